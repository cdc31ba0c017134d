"""A probe of servers' weights: the log-probabilities of one fixed prompt's completion, from each."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mmrender.client.engine import Engine
from mmrender.client.types import EngineResponse
from mmrender.workers import gather_all


@dataclass(frozen=True, slots=True)
class WeightsProbe:
    """Answers of servers to one prompt, in groups of equal weights.

    Attributes:
        groups: For each set of weights, the most frequent first, its answers by the server's address.
        answers: The first answer of each group, to be compared with a trainer's model.
    """

    groups: tuple[Mapping[str, int], ...]
    answers: tuple[EngineResponse, ...]

    @property
    def ok(self) -> bool:
        """Whether all answers are of the same weights."""
        return len(self.groups) < 2

    def text(self) -> str:
        """The probe for a terminal: a line for each set of weights."""
        lines = []
        for number, group in enumerate(self.groups):
            counts = ", ".join(f"{name} ({count} answers)" for name, count in group.items())
            lines.append(f"weights {number}: {counts}")
        return "\n".join(lines)


async def probe_weights(
    engines: Sequence[Engine],
    prompt_ids: Sequence[int],
    *,
    tokens: int = 16,
    tries: int = 4,
    tolerance: float = 0.05,
) -> WeightsProbe:
    """Ask each server for the greedy completion of one prompt, and compare the log-probabilities.

    Servers that were not updated, or updated in part, answer otherwise. Several processes behind one address
    answer in turn, so each address is asked `tries` times, without its prefix cache.

    Args:
        engines: The servers.
        prompt_ids: A prompt of text alone, the same at each call.
        tokens: Length of the completion.
        tries: Requests to each server.
        tolerance: In nats. The arithmetic of one set of weights differs by less.

    Raises:
        EngineError: A server cannot be asked.
    """
    params = {"temperature": 0.0, "max_tokens": tokens}
    asked = [(engine, f"probe-{number}") for engine in engines for number in range(tries)]
    calls = [
        engine.sample(engine.prompt(list(prompt_ids)), params, cache_salt=salt) for engine, salt in asked
    ]
    groups: list[tuple[EngineResponse, Counter[str]]] = []
    for (engine, _), answer in zip(asked, await gather_all(calls), strict=True):
        name = engine.transport.base_url or engine.backend.name
        known = (names for first, names in groups if _apart(first, answer) <= tolerance)
        names = next(known, None)
        if names is None:
            groups.append((answer, names := Counter[str]()))
        names[name] += 1
    groups.sort(key=lambda group: -group[1].total())
    return WeightsProbe(tuple(names for _, names in groups), tuple(first for first, _ in groups))


def _apart(one: EngineResponse, two: EngineResponse) -> float:
    """Return the largest difference up to the first token that differs, that token included."""
    pairs = zip(one.completion_ids, two.completion_ids, strict=False)
    same = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
    stop = min(len(one.logprobs), len(two.logprobs)) if same is None else same + 1
    return float(np.abs(np.subtract(one.logprobs[:stop], two.logprobs[:stop])).max(initial=0.0))
