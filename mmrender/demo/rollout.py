"""A rollout: the model is sampled over four turns with pictures and a tool, each turn bridged to the next.

The tiny model's weights are random, so what it says is noise; the second turn is held to one tool call and
nothing else, as engines do with a grammar.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mmrender.demo.conversation import SYSTEM, TOOLS, load_pictures
from mmrender.demo.proofs import Proof, joined_tensors
from mmrender.parsing import ParsedResponse
from mmrender.renderer import Renderer
from mmrender.rollout.renderer_client import Completion, RendererClient
from mmrender.trajectory.tree import Trajectory

_MAX_NEW_TOKENS = 24
_ARGUMENTS = {"top": 131, "bottom": 259}
_CALL = {"type": "function", "function": {"name": "divide", "arguments": _ARGUMENTS}}
_HELD_TO = [{"role": "assistant", "content": "", "tool_calls": [_CALL]}]
_HELD_TURN = 1


@dataclass(frozen=True)
class Rollout:
    """Four turns, the trajectory that they make, and how many tokens their bridges encoded."""

    turns: list[Completion]
    trajectory: Trajectory
    encoded: int

    @property
    def parsed(self) -> list[ParsedResponse]:
        """What each turn says."""
        return [turn.generation.parsed for turn in self.turns if turn.generation is not None]


async def roll_out(client: RendererClient, renderer: Renderer) -> Rollout:
    """Sample four turns of one conversation.

    Args:
        client: Samples with `renderer`.
        renderer: The renderer of the model.
    """
    conversation: list[Any] = [{"role": "system", "content": SYSTEM}]
    trajectory = Trajectory("conversation")
    turns: list[Completion] = []
    with _EncodeCounter(renderer) as counter:
        for index, shown in enumerate(_user_turns(renderer)):
            held = index == _HELD_TURN
            conversation += shown
            turn = await client.create_completion(
                conversation,
                trajectory=trajectory,
                tools=TOOLS,
                sampling_params={"seed": index, "max_tokens": 64 if held else _MAX_NEW_TOKENS},
                choices=_HELD_TO if held else None,
            )
            conversation.append(turn.message)
            turns.append(turn)
    return Rollout(turns, trajectory, counter.tokens)


def _user_turns(renderer: Renderer) -> list[list[dict[str, Any]]]:
    """What stands before each of the model's turns."""
    photo, chart = load_pictures()
    crop = _image(chart.crop((0, 0, chart.width // 2, chart.height // 2)))
    result = {"role": "tool", "name": "divide", "tool_call_id": f"call_{_HELD_TURN}_0"}
    if "tool" in renderer.profile.image_roles:
        answered = [{**result, "content": [_text("0.506"), crop]}]
    else:
        answered = [{**result, "content": "0.506"}, {"role": "user", "content": [crop]}]
    return [
        [{"role": "user", "content": [_image(photo), _text("Which animal is this?")]}],
        [{"role": "user", "content": [_image(chart), _text("March as a part of June?")]}],
        answered,
        [{"role": "user", "content": "Which month was best?"}],
    ]


def _image(picture: Any) -> dict[str, Any]:
    return {"type": "image", "image": picture}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


@dataclass
class _EncodeCounter:
    """Counts the tokens that a renderer's tokenizer encodes while a turn is bridged."""

    renderer: Any
    tokens: int = 0
    _bridging: bool = field(default=False, init=False)

    def __enter__(self) -> "_EncodeCounter":
        tokenizer = self.renderer.tokenizer
        encode_run, bridge = tokenizer.encode_run, self.renderer.bridge_to_next_turn

        def counted(text: str, *, first: bool = False) -> Any:
            run = encode_run(text, first=first)
            self.tokens += len(run.ids) if self._bridging else 0
            return run

        def watched(*arguments: Any, **options: Any) -> Any:
            self._bridging = True
            try:
                return bridge(*arguments, **options)
            finally:
                self._bridging = False

        tokenizer.encode_run, self.renderer.bridge_to_next_turn = counted, watched
        return self

    def __exit__(self, *_: object) -> None:
        del self.renderer.tokenizer.encode_run, self.renderer.bridge_to_next_turn


def prove_rollout(renderer: Renderer, rollout: Rollout) -> list[Proof]:
    """Show that every sampled token stands where it was sampled, and that none was encoded again."""
    steps = rollout.trajectory.steps
    (branch, *others) = rollout.trajectory.branches()
    sampled = [token for step in steps for token in step.completion_ids.tolist()]
    marked = branch.token_ids[branch.sample().loss_mask].tolist()
    in_place = all(
        np.array_equal(branch.token_ids[step.prompt_length : len(step)], step.completion_ids)
        for step in steps
    )
    tails = sum(_text_tokens(renderer, step.prompt_delta.tolist()) for step in steps[1:])
    called = [
        call.arguments for parsed in rollout.parsed for call in parsed.tool_calls if call.status == "ok"
    ]
    images = len(branch.multi_modal_data.mm_hashes.get("image", ()))
    everything = not others and in_place and marked == sampled
    return [
        Proof("sampled ids equal, in place", everything, f"{len(sampled)} tokens, {len(steps)} turns"),
        Proof("re-encoded 0", rollout.encoded == tails, f"{rollout.encoded} encoded, all of new messages"),
        Proof("the tool call reads back", _ARGUMENTS in called, "from sampled tokens"),
        Proof("pictures carried to the end", images == 3, f"{images}, one of them from the tool"),
    ]


def prove_drift(renderer: Renderer, rollout: Rollout) -> Proof:
    """Show what is at stake: text of sampled tokens, encoded again, is often other tokens."""
    completions = [step.completion_ids.tolist() for step in rollout.trajectory.steps]
    drifted = sum(renderer.tokenizer.encode(renderer.decode(ids)) != ids for ids in completions)
    detail = f"{drifted} of {len(completions)} turns would change"
    return Proof("encoding again would drift", drifted > 0, detail)


def prove_logprobs(model: Any, rollout: Rollout) -> Proof:
    """Hold the sampler's logprobs against one plain forward of the whole conversation."""
    import torch

    (branch, *_) = rollout.trajectory.branches()
    ids = torch.from_numpy(branch.token_ids.astype(np.int64))[None]
    with torch.inference_mode():
        logits = model(input_ids=ids, **joined_tensors(branch.multi_modal_data, len(branch))).logits[0]
    logprobs = logits.float().log_softmax(-1)
    worst = 0.0
    # Logprobs of the turn that a grammar held are those of what it allowed.
    free = [step for step in rollout.trajectory.steps if step.index != _HELD_TURN]
    for step in free:
        rows = logprobs[step.prompt_length - 1 : len(step) - 1]
        plain = rows[range(len(rows)), step.completion_ids.tolist()]
        worst = max(worst, float((plain - torch.tensor(step.logprobs)).abs().max()))
    count = sum(len(step.completion_ids) for step in free)
    return Proof("logprobs equal a plain forward's", worst < 1e-4, f"{count} of them, difference {worst:.0e}")


def _text_tokens(renderer: Renderer, tail: Sequence[int]) -> int:
    """Tokens that a bridge appended, without special tokens and pads, which need no encoding."""
    added = set(renderer.tokenizer.added_ids.values())
    return sum(token not in added for token in tail)
