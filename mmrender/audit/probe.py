"""A probe of servers' weights: the log-probabilities of one fixed prompt's completion, from each."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmrender.audit.report import Comparison
from mmrender.audit.trainer import TrainerModel
from mmrender.client.engine import Engine
from mmrender.client.types import EngineResponse
from mmrender.trajectory.sample import TrainingSample


@dataclass(frozen=True, slots=True)
class WeightsProbe:
    """Answers of servers to one prompt, in groups of equal weights.

    Attributes:
        groups: Answers in groups, the largest first: names of servers, one for each answer.
        differences: Largest difference of each group's log-probabilities from the trainer's, in nats; empty
            without a trainer.
        tolerance: In nats. Larger differences are other weights.
    """

    groups: tuple[tuple[str, ...], ...]
    differences: tuple[float, ...]
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether all answers are of the same weights, the trainer's if there is one."""
        return len(self.groups) < 2 and all(each <= self.tolerance for each in self.differences)

    def text(self) -> str:
        """The probe for a terminal: a line for each group."""
        lines = []
        for number, names in enumerate(self.groups):
            counts = [f"{name} ({names.count(name)} answers)" for name in dict.fromkeys(names)]
            apart = f", {self.differences[number]:.3g} nats from the trainer" if self.differences else ""
            lines.append(f"weights {number}: {', '.join(counts)}{apart}")
        return "\n".join(lines)


async def probe_weights(
    engines: Sequence[Engine],
    prompt_ids: Sequence[int],
    *,
    trainer: TrainerModel | None = None,
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
        trainer: The trainer's model, to compare with.
        tokens: Length of the completion.
        tries: Requests to each server.
        tolerance: In nats. The arithmetic of one set of weights differs by less.

    Raises:
        EngineError: A server cannot be asked.
    """
    params = {"temperature": 0.0, "max_tokens": tokens}
    asked = [(engine, number) for engine in engines for number in range(tries)]
    answers = await asyncio.gather(
        *(
            engine.sample(engine.prompt(list(prompt_ids)), params, cache_salt=f"probe-{number}")
            for engine, number in asked
        )
    )
    groups: list[list[tuple[str, EngineResponse]]] = []
    for (engine, _), answer in zip(asked, answers, strict=True):
        name = engine.transport.base_url or engine.backend.name
        for group in groups:
            if _apart(group[0][1], answer) <= tolerance:
                group.append((name, answer))
                break
        else:
            groups.append([(name, answer)])
    groups.sort(key=len, reverse=True)
    firsts = [group[0][1] for group in groups]
    differences = [_from_trainer(trainer, prompt_ids, one) for one in firsts] if trainer is not None else []
    named = tuple(tuple(name for name, _ in group) for group in groups)
    return WeightsProbe(named, tuple(differences), tolerance)


def _apart(one: EngineResponse, two: EngineResponse) -> float:
    """Return the largest difference up to the first token that differs, that token included."""
    pairs = zip(one.completion_ids, two.completion_ids, strict=False)
    same = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
    stop = min(len(one.logprobs), len(two.logprobs)) if same is None else same + 1
    return float(np.abs(np.subtract(one.logprobs[:stop], two.logprobs[:stop])).max(initial=0.0))


def _from_trainer(trainer: TrainerModel, prompt_ids: Sequence[int], answer: EngineResponse) -> float:
    ids = np.array([*prompt_ids, *answer.completion_ids], np.int32)
    logprobs = np.zeros(len(ids), np.float32)
    logprobs[len(prompt_ids) :] = answer.logprobs
    sample = TrainingSample(ids, np.arange(len(ids)) >= len(prompt_ids), logprobs)
    return Comparison.of_sampled(sample, trainer.sampled_logprobs(sample)).largest
