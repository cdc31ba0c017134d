"""Laws of rollouts, over conversations that go on, are asked again, are edited, cut short and broken off."""

import asyncio
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrender.errors import EngineTimeoutError
from mmrender.messages import Message
from mmrender.renderer import Renderer
from mmrender.rollout.client import RendererClient
from mmrender.rollout.generator import VLMGenerator
from mmrender.trajectory.tree import Trajectory
from rollout_cases import TOOLS, ScriptedBackend, ScriptedEnvironment, asks, call, ends, shown, text

words = st.sampled_from(["A cow.", "Look there", "no", "  spaced  ", "1\n2\n", "«ü»", "The end, or not?"])
said = st.one_of(
    words,
    st.builds(lambda thought, rest: f"<think>\n{thought}\n</think>\n\n{rest}", words, words),
    st.lists(st.integers(0, 9), min_size=1, max_size=3).map(lambda ats: "\n".join(map(call, ats))),
    # What a model samples need not be how a tokenizer would spell it.
    st.lists(st.integers(0, 1000), min_size=1, max_size=8),
)
pictures = st.lists(st.integers(0, 3), max_size=2)
turns = st.builds(
    lambda spoken, images: {"role": "user", "content": [*map(shown, images), text(spoken)]}, words, pictures
)


@dataclass(frozen=True)
class Op:
    """What a caller does next: `kind`, with a turn of the user's and what the model says."""

    kind: str
    turn: dict[str, Any]
    said: Any
    cut: bool
    pick: int


ops = st.builds(
    Op,
    kind=st.sampled_from(["go on", "go on", "go on", "again", "edit", "forget start", "other turn", "fail", "cancel"]),
    turn=turns,
    said=said,
    cut=st.booleans(),
    pick=st.integers(0, 50),
)  # fmt: skip


@dataclass
class Caller:
    """Holds conversations with one trajectory, and checks the laws after each call."""

    renderer: Renderer
    trajectory: Trajectory = field(default_factory=lambda: Trajectory("law"))
    histories: list[tuple[list[Any], Any]] = field(default_factory=list)
    pending: Any = None

    def __post_init__(self) -> None:
        self.backend = ScriptedBackend(self.renderer, lambda _: self.pending)
        self.client = RendererClient(self.renderer, backend=self.backend, model="m")

    def apply(self, op: Op) -> None:
        messages, base = self.conversation(op)
        self.pending = EngineTimeoutError("slow") if op.kind == "fail" else op.said
        if op.kind == "cancel":
            self.pending = None
        self.backend.cut = op.cut
        before = self.state()
        asked = len(self.backend.requests)
        ended = asyncio.run(self.ask(messages))
        if op.kind in ("fail", "cancel"):
            assert isinstance(ended, EngineTimeoutError | asyncio.CancelledError)
            assert self.state() == before
            return
        self.check(op, messages, base, ended, self.backend.requests[asked])
        self.histories.append(([*messages, ended.message], ended.step))

    async def ask(self, messages: list[Any]) -> Any:
        asked = len(self.backend.requests)
        call = self.client.create_completion(messages, trajectory=self.trajectory, tools=TOOLS)
        task = asyncio.ensure_future(call)
        while self.pending is None and len(self.backend.requests) == asked and not task.done():
            await asyncio.sleep(0.0005)
        if self.pending is None:
            task.cancel()
        try:
            return await task
        except (EngineTimeoutError, asyncio.CancelledError) as ended:
            return ended

    def conversation(self, op: Op) -> tuple[list[Any], Any]:
        """Messages of the next call, and the step that they go on from or ask again, if any."""
        opening = [{"role": "system", "content": "Look."}, op.turn]
        if not self.histories:
            return opening, None
        history, step = self.histories[op.pick % len(self.histories)]
        if op.kind == "again":
            return history[:-1], step
        if op.kind == "edit":
            system = {"role": "system", "content": f"Look {op.pick}."}
            return [system, *history[1:], *self.following(history, op)], None
        if op.kind == "forget start":
            return [history[0], op.turn, *history[2:], *self.following(history, op)], None
        if op.kind == "other turn":
            other = Message(role="assistant", content=f"I never said {op.pick}")
            return [*history[:-1], other, op.turn], None
        return [*history, *self.following(history, op)], step

    def following(self, history: list[Any], op: Op) -> list[Any]:
        """What may follow a turn: results of its calls, or a user's turn."""
        result = {"role": "tool", "content": op.turn["content"]}
        calls = history[-1].tool_calls
        return [result | {"tool_call_id": made.id, "name": made.name} for made in calls] or [op.turn]

    def state(self) -> Any:
        steps = [(step.token_ids.tolist(), step.keep) for step in self.trajectory.steps]
        return steps, len(self.trajectory.items)

    def check(self, op: Op, messages: list[Any], base: Any, done: Any, request: Any) -> None:
        step = done.step
        # What was sent is what is kept, token for token and image for image.
        assert request.prompt_ids == step.prompt_ids.tolist()
        for name in ("mm_hashes", "mm_placeholders"):
            assert getattr(request.multi_modal_data, name) == getattr(step.multi_modal_data, name)
        assert done.generation.completion_ids == step.completion_ids.tolist()
        assert step.extra == {"why_rendered": done.why_rendered}
        if done.why_rendered is None:
            # Bridged: the prompt begins with a step of the trajectory, all that was sampled included; or it
            # is a step's prompt again.
            prompt = step.prompt_ids.tolist()
            earlier = [each for each in self.trajectory.steps if each is not step]
            is_again = prompt in [each.prompt_ids.tolist() for each in earlier]
            begun = [each for each in earlier if prompt[: len(each)] == each.token_ids.tolist()]
            if op.kind == "again":
                assert is_again
            elif not is_again:
                assert any(each.messages == step.messages[: len(each.messages)] for each in begun)
        else:
            full = self.renderer.render(messages, tools=TOOLS, add_generation_prompt=True)
            assert request.prompt_ids == full.token_ids
            assert request.multi_modal_data.mm_hashes == full.multi_modal_data.mm_hashes
        if base is not None and op.kind != "edit":
            # This template bridges every extension, so nothing that goes on from a step is rendered.
            assert done.why_rendered is None


@settings(max_examples=30)
@given(script=st.lists(ops, min_size=1, max_size=8))
def test_prompts_begin_with_what_was_sampled_or_say_why_not(renderer, script):
    caller = Caller(renderer)
    for op in script:
        caller.apply(op)


failures = st.sampled_from([None, None, None, "environment", "engine"])
episodes = st.lists(st.tuples(st.integers(0, 3), failures, st.integers(-3, 3)), min_size=1, max_size=8)
delays = st.lists(st.integers(0, 12), min_size=40, max_size=40)


@settings(max_examples=25)
@given(episodes=episodes, delays=delays, concurrency=st.integers(1, 8), step_wise=st.booleans())
def test_order_and_failures_are_kept(renderer, episodes, delays, concurrency, step_wise):
    """An episode: how many turns, who fails, and the reward of its end."""
    # The picture of a rollout's opening tells whose request it is.
    opening = [{"role": "user", "content": [shown(index)]} for index in range(len(episodes))]
    digests = renderer.render(opening).multi_modal_data.mm_hashes["image"]
    failing = {digest for digest, (_, fails, _) in zip(digests, episodes, strict=True) if fails == "engine"}

    def say(request):
        first = request.multi_modal_data.mm_hashes["image"][0]
        return EngineTimeoutError("slow") if first in failing else "Yes."

    def environment(turns, fails, reward):
        last = ValueError("lost") if fails == "environment" else ends(float(reward))
        return ScriptedEnvironment([*(asks(f"Turn {turn}?", 0.5) for turn in range(turns)), last])

    backend = ScriptedBackend(renderer, say, delays=iter(delays * 4))
    client = RendererClient(renderer, backend=backend, model="m")
    generator = VLMGenerator(client, max_concurrency=concurrency, step_wise=step_wise)
    batch = {
        "prompts": [[]] * len(episodes),
        "env_classes": [partial(environment, *episode) for episode in episodes],
        "env_extras": [{"picture": index} for index in range(len(episodes))],
    }
    out = asyncio.run(generator.generate(batch))
    assert backend.busiest <= concurrency
    names = [int(name.instance_id) for name in out["trajectory_ids"]]
    assert names == sorted(names)
    assert sorted(set(names)) == list(range(len(episodes)))
    for index, (turns, fails, reward) in enumerate(episodes):
        rows = [row for row, name in enumerate(names) if name == index]
        assert [out["is_last_step"][row] for row in rows] == [False] * (len(rows) - 1) + [True]
        for row in rows:
            size = len(out["response_ids"][row])
            aligned = ("loss_masks", "rewards", "rollout_logprobs")
            assert [len(out[key][row]) for key in aligned] == [size] * 3
            assert (out["errors"][row] is None) == (fails is None)
            masked = zip(out["loss_masks"][row], out["rollout_logprobs"][row], strict=True)
            if fails is None:
                assert all((logprob != 0.0) == bool(trained) for trained, logprob in masked)
        earned = sum(sum(out["rewards"][row]) for row in rows)
        trained = sum(sum(out["loss_masks"][row]) for row in rows)
        if fails is not None:
            assert earned == trained == 0
            continue
        turn = len(renderer.tokenizer.encode("Yes.")) + 1
        assert earned == pytest.approx(0.5 * turns + reward)
        assert trained == turn * (turns + 1)
        if step_wise:
            assert len(rows) == turns + 1
