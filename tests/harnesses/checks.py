"""A session's trajectory beside the requests that its engine received: ids, places and token counts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from harnesses.scripted_model import Exchange
from mmrender.trajectory.tree import Trajectory


@dataclass(frozen=True)
class Count:
    """Calls of a session.

    Attributes:
        calls: All calls.
        bridged: Calls whose prompt continues or repeats a recorded one.
        rendered: Reasons of the other calls, in order.
        kinds: Calls by kind of their root.
        tree_tokens: Tokens of the trajectory, each once.
        call_tokens: Tokens if each call is a sample.
        images: Distinct media items.
    """

    calls: int
    bridged: int
    rendered: tuple[str, ...]
    kinds: Counter[str] = field(default_factory=Counter)
    tree_tokens: int = 0
    call_tokens: int = 0
    images: int = 0


def check_ids(trajectory: Trajectory, exchanges: Sequence[Exchange]) -> None:
    """Require that each step has the ids that the engine received and sampled, and its log-probabilities."""
    recorded = [
        (tuple(step.prompt_ids.tolist()), tuple(step.completion_ids.tolist())) for step in trajectory.steps
    ]
    sent = [(each.prompt_ids, each.completion_ids) for each in exchanges]
    assert Counter(recorded) == Counter(sent)
    for step in trajectory.steps:
        assert step.logprobs is not None
        assert len(step.logprobs) == len(step.completion_ids)


def count(trajectory: Trajectory) -> Count:
    """Count a session's calls."""
    records = [step.extra["gateway"] for step in trajectory.steps]
    kinds: Counter[str] = Counter()
    for record in records:
        top = record
        while "from" in top:
            top = records[top["from"]]
        kinds[top.get("kind", "unknown")] += 1
    return Count(
        calls=len(records),
        bridged=sum(record["prompt"] != "rendered" for record in records),
        rendered=tuple(record["why_rendered"] for record in records if record["prompt"] == "rendered"),
        kinds=kinds,
        tree_tokens=sum(len(step.own_ids) for step in trajectory.steps),
        call_tokens=sum(len(step) for step in trajectory.steps),
        images=len(trajectory.items),
    )
