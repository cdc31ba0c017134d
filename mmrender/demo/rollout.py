"""A rollout: the model is sampled over four turns with pictures and a tool, each turn bridged to the next.

The weights are random, so what it says is noise; the second turn is sampled under a guide that allows one
tool call and nothing else, as engines do with a grammar.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmrender.demo.conversation import SYSTEM, TOOLS, load_pictures
from mmrender.demo.proofs import Proof, model_inputs
from mmrender.parsing import ParsedResponse
from mmrender.rendered import RenderedTokens
from mmrender.renderer import Renderer

_MAX_NEW_TOKENS = 24
_CALL = '<tool_call>\n{"name": "divide", "arguments": {"top": 131, "bottom": 259}}\n</tool_call>'


@dataclass(frozen=True)
class Turn:
    """One turn: what the model was asked with, what it sampled, and how that reads."""

    prompt: RenderedTokens
    completion: list[int]
    parsed: ParsedResponse


def roll_out(model: Any, renderer: Renderer) -> tuple[list[Turn], RenderedTokens, int]:
    """Sample four turns.

    Args:
        model: A loaded `AutoModelForImageTextToText`.
        renderer: The renderer of its directory.

    Returns:
        The turns, the prompt that a fifth would begin with, and how many tokens the bridges encoded.
    """
    photo, chart = load_pictures()
    crop = chart.crop((0, 0, chart.width // 2, chart.height // 2))
    extensions: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": [{"type": "image", "image": chart}, _text("March as a part of June?")]}],
        [{"role": "tool", "name": "divide", "content": [_text("0.506"), {"type": "image", "image": crop}]}],
        [{"role": "user", "content": "Which month was best?"}],
        [{"role": "user", "content": "Thank you."}],
    ]
    opening = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": [{"type": "image", "image": photo}, _text("Which animal is this?")]},
    ]
    prompt = renderer.render(opening, tools=TOOLS, add_generation_prompt=True)
    turns: list[Turn] = []
    with _EncodeCounter(renderer) as counter:
        for index, extension in enumerate(extensions):
            completion = _sample(model, renderer, prompt, guide=_CALL if index == 1 else None)
            parsed = renderer.parse_response(completion, tools=TOOLS, prompt_ids=prompt.token_ids)
            turns.append(Turn(prompt, completion, parsed))
            with counter.counting():
                bridged = renderer.bridge_to_next_turn(
                    prompt.token_ids,
                    completion,
                    extension,
                    tools=TOOLS,
                    previous_multi_modal_data=prompt.multi_modal_data,
                )
            if bridged is None:
                raise RuntimeError(
                    f"the demonstration's template was not bridged: {renderer.why_not_bridged}"
                )
            prompt = bridged
    return turns, prompt, counter.tokens


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


class _EncodeCounter:
    """Counts the tokens that a renderer's tokenizer encodes while asked to."""

    def __init__(self, renderer: Renderer) -> None:
        self._tokenizer: Any = renderer.tokenizer
        self.tokens = 0
        self._on = False

    def __enter__(self) -> "_EncodeCounter":
        encode_run = self._tokenizer.encode_run

        def counted(text: str, *, first: bool = False) -> Any:
            run = encode_run(text, first=first)
            self.tokens += len(run.ids) if self._on else 0
            return run

        self._tokenizer.encode_run = counted
        return self

    def __exit__(self, *_: object) -> None:
        del self._tokenizer.encode_run

    def counting(self) -> "_Switch":
        """Count within a `with` block."""
        return _Switch(self)


class _Switch:
    def __init__(self, counter: _EncodeCounter) -> None:
        self._counter = counter

    def __enter__(self) -> None:
        self._counter._on = True

    def __exit__(self, *_: object) -> None:
        self._counter._on = False


def _sample(model: Any, renderer: Renderer, prompt: RenderedTokens, guide: str | None) -> list[int]:
    """Sample until a stop token or the length limit; under a guide, exactly its tokens."""
    import torch

    stop_ids = renderer.get_stop_token_ids()
    guided = [*renderer.tokenizer.encode(guide), stop_ids[-1]] if guide is not None else None
    start = len(prompt)

    def allowed(_: int, ids: Any) -> list[int]:
        done = ids.shape[0] - start
        return list(range(renderer.tokenizer.vocab_size)) if guided is None else [guided[done]]

    torch.manual_seed(start)
    output = model.generate(
        input_ids=torch.tensor([prompt.token_ids]),
        attention_mask=torch.ones(1, start, dtype=torch.int64),
        **model_inputs(prompt),
        do_sample=True,
        max_new_tokens=_MAX_NEW_TOKENS if guided is None else len(guided),
        eos_token_id=stop_ids,
        pad_token_id=stop_ids[0],
        prefix_allowed_tokens_fn=allowed,
    )
    sampled: list[int] = output[0, start:].tolist()
    return sampled


def prove_rollout(
    renderer: Renderer, turns: Sequence[Turn], final: RenderedTokens, encoded: int
) -> list[Proof]:
    """Show that every sampled token stands where it was sampled, and that none was encoded again."""
    sampled = [token for turn in turns for token in turn.completion]
    following = [*[turn.prompt for turn in turns[1:]], final]
    kept = all(
        after.token_ids[: len(turn.prompt) + len(turn.completion)]
        == [*turn.prompt.token_ids, *turn.completion]
        for turn, after in zip(turns, following, strict=True)
    )
    marked = [
        token
        for token, is_sampled in zip(final.token_ids, _sampled_mask(turns, final), strict=True)
        if is_sampled
    ]
    tails = sum(_text_tokens(renderer, turn, after) for turn, after in zip(turns, following, strict=True))
    again = [renderer.tokenizer.encode(renderer.decode(turn.completion)) for turn in turns]
    drifted = sum(ids != turn.completion for ids, turn in zip(again, turns, strict=True))
    attempts = [call for turn in turns for call in turn.parsed.tool_calls]
    called = [call.arguments for call in attempts if call.status == "ok"]
    images = len(final.multi_modal_data.mm_hashes.get("image", ()))
    everything = kept and marked == sampled
    return [
        Proof("sampled ids equal, in place", everything, f"{len(sampled)} tokens, {len(turns)} turns"),
        Proof("re-encoded 0", encoded == tails, f"{encoded} encoded, all of new messages"),
        Proof("the tool call reads back", called == [{"top": 131, "bottom": 259}], "from sampled tokens"),
        Proof("pictures carried to the end", images == 3, f"{images}, one of them from the tool"),
        Proof("encoding again would drift", drifted > 0, f"{drifted} of {len(turns)} turns would change"),
    ]


def _sampled_mask(turns: Sequence[Turn], final: RenderedTokens) -> list[bool]:
    mask = [False] * len(final)
    for turn in turns:
        start = len(turn.prompt)
        mask[start : start + len(turn.completion)] = [True] * len(turn.completion)
    return mask


def _text_tokens(renderer: Renderer, turn: Turn, after: RenderedTokens) -> int:
    """Tokens that the bridge appended, without special tokens and pads, which need no encoding."""
    added = set(renderer.tokenizer.added_ids.values())
    tail = after.token_ids[len(turn.prompt) + len(turn.completion) :]
    return sum(token not in added for token in tail)
