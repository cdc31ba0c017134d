"""Bridges against full renderings, on generated turns, tool cycles, images and cut-off completions.

A case is one assistant turn and the messages after it. Its reference is the rendering of the whole
conversation. The reference is *stable* if it begins with the prompt and the completion: then a bridge must
equal it, token for token, or in its text if the end of the prompt merges with the answer and only the text
begins so. Otherwise the template writes the turn differently than it was sampled, and the tail of a bridge is
compared with the end of the rendering, from the first new message on.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, NamedTuple

from mmrender.errors import MMRenderError
from mmrender.messages import MessageLike
from mmrender.renderer import Renderer
from mmrender.sidecar import common_prefix
from mmrender.testing.conversations import ConversationMaker, sample_images
from mmrender.testing.reference import has_reference_backend, import_torchvision
from mmrender.tokens.rendered import CONTENT_KINDS, RenderedTokens

Ending = Literal["as written", "another stop token", "cut off"]
_ENDINGS: tuple[Ending, ...] = ("as written", "as written", "cut off", "another stop token")
_FOLLOWING: dict[str, Any] = {"role": "user", "content": "And now?"}
_ATTEMPTS = 20
"""Maximum number of conversations drawn for a case, since a template may refuse some."""

Stability = Literal["tokens", "text", "none"]


class BridgeCase(NamedTuple):
    """One assistant turn, its ending, the messages after it, and the rendering of all of it.

    `stability` says whether the rendering's tokens or its text begin with the prompt and the completion.
    """

    ending: Ending
    stability: Stability
    prompt: RenderedTokens
    completion: Sequence[int]
    extension: Sequence[MessageLike]
    options: dict[str, Any]
    full: RenderedTokens

    @property
    def sampled(self) -> list[int]:
        """Token ids that a bridge begins with."""
        return [*self.prompt.token_ids, *self.completion]


class BridgeMismatch(NamedTuple):
    """A bridge that differs from its reference, with the first difference."""

    case: BridgeCase
    what: str
    bridge: str
    reference: str


@dataclass
class BridgeReport:
    """Outcome for one model.

    Attributes:
        model: Its name.
        stable: Number of cases with a stable reference.
        in_text: Number of cases that are stable in their text alone.
        unstable: Number of cases with an unstable reference.
        declined: Number of stable cases without a bridge, by reason.
        declined_unstable: Number of unstable cases without a bridge, by reason.
        mismatches: Cases in which the bridge is wrong.
    """

    model: str
    stable: int = 0
    in_text: int = 0
    unstable: int = 0
    declined: Counter[str] = field(default_factory=Counter)
    declined_unstable: Counter[str] = field(default_factory=Counter)
    mismatches: list[BridgeMismatch] = field(default_factory=list)

    HEADER: ClassVar = (
        "| model | stable | in text | equal | declined | unstable | declined | wrong | why declined |",
        "|---|--:|--:|--:|--:|--:|--:|--:|---|",
    )
    """Markdown above rows of reports."""

    @property
    def equal(self) -> int:
        """Number of stable cases in which the bridge equals the rendering."""
        different = sum(mismatch.case.stability != "none" for mismatch in self.mismatches)
        return self.stable - different - self.declined.total()

    def counts(self) -> dict[str, Any]:
        """Return everything but the mismatches, which are counted, for JSON."""
        names = [entry.name for entry in fields(self) if entry.name != "mismatches"]
        counted = {"equal": self.equal, "wrong": len(self.mismatches)}
        return {name: getattr(self, name) for name in names} | counted

    def row(self) -> str:
        """Return the counts as a row of a Markdown table."""
        counts = (self.stable, self.in_text, self.equal, self.declined.total(), self.unstable)
        reasons = (self.declined + self.declined_unstable).most_common()
        cells = (self.model, *counts, self.declined_unstable.total(), len(self.mismatches))
        why = "; ".join(f"{count} {reason}" for reason, count in reasons)
        return f"| {' | '.join(map(str, cells))} | {why} |"

    def problems(self) -> list[str]:
        """Return each wrong bridge, with both sides."""
        return [
            f"{self.model}, a completion {case.ending}: {what} differ\nbridge: {ours!r}\nreference: {full!r}"
            for case, what, ours, full in self.mismatches
        ]


def check_bridge(renderer: Renderer, model: str, *, cases: int, seed: int = 0) -> BridgeReport:
    """Compare bridges with renderings of the whole conversation.

    Args:
        renderer: The model's renderer.
        model: Name for the report.
        cases: Maximum number of cases. The template may refuse conversations.
        seed: Of the generated conversations.

    Raises:
        ProcessorError: The model's images cannot be processed here.
        MissingDependencyError: They need a package that is not installed.
    """
    report = BridgeReport(model)
    if renderer.media is not None:
        # Without its images, a family would count as good.
        if has_reference_backend("torch"):
            import_torchvision()
        renderer.media.require_processor(model)
    source = random.Random(seed)
    images = sample_images(source, 6, largest=160) if renderer.media is not None else []
    maker = ConversationMaker(renderer.profile, images)
    found = (_draw_case(renderer, maker, source) for _ in range(cases * _ATTEMPTS))
    for _, case in zip(range(cases), filter(None, found), strict=False):
        bridge = renderer.bridge_to_next_turn(
            case.prompt.token_ids,
            case.completion,
            case.extension,
            previous_multi_modal_data=case.prompt.multi_modal_data,
            previous_roles=case.prompt.roles,
            **case.options,
        )
        stable = case.stability != "none"
        report.stable += stable
        report.in_text += case.stability == "text"
        report.unstable += not stable
        if bridge is None:
            (report.declined if stable else report.declined_unstable)[renderer.why_not_bridged or ""] += 1
        elif (difference := _difference(bridge, case)) is not None:
            report.mismatches.append(BridgeMismatch(case, *difference))
    return report


def _draw_case(renderer: Renderer, maker: ConversationMaker, source: random.Random) -> BridgeCase | None:
    """Return a case of a new conversation. None if the template refuses it or nothing follows a turn."""
    messages, options = maker.make(source)
    del options["add_generation_prompt"]
    messages = [_as_sampled(message, renderer) for message in messages]
    if messages[-1]["role"] == "assistant":
        messages.append(_FOLLOWING)
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    index = source.choice(turns)
    after = [at for at in turns if at > index]
    extension = messages[index + 1 : after[0] if after else None]
    if not extension:
        return None
    stops = renderer.get_stop_token_ids()
    ending: Ending = source.choice(_ENDINGS) if stops else "cut off"
    try:
        prompt = renderer.render(messages[:index], **options, add_generation_prompt=True)
        full = renderer.render([*messages[: index + 1], *extension], **options, add_generation_prompt=True)
        alone = renderer.render(messages[: index + 1], **options)
        sampled = [_sampled(rendered, index) for rendered in (full, alone)]
        # Without its stop token, a turn may end in a token that the next message has a part in.
        completion = next((turn for turn in sampled if turn and turn[-1] in stops), None)
        completion = completion or sampled[-1] or _written(renderer, full, index)
        ends_in_call = False
        if ending == "another stop token":
            stop = len(completion) - (completion[-1] in stops)
            completion = [*completion[:stop], source.choice(stops)]
        if ending == "cut off":
            completion = completion[: source.randint(0, len(completion) - 1)]
            read = renderer.parse_response(completion, prompt_ids=prompt.token_ids, **options)
            # After a call, only the model can say whether another one follows.
            ends_in_call = any(call.span[1] == len(completion) for call in read.tool_calls)
            # No tool ran, since the turn did not end.
            extension = [message for message in extension if message["role"] != "tool"] or [_FOLLOWING]
            conversation: list[MessageLike] = [*messages[:index], read.to_message(), *extension]
            full = renderer.render(conversation, **options, add_generation_prompt=True)
    except MMRenderError:
        return None
    whole = [*prompt.token_ids, *completion]
    stability: Stability = "none"
    if not ends_in_call and full.token_ids[: len(whole)] == whole:
        stability = "tokens"
    elif not ends_in_call and full.decode().startswith(renderer.decode(whole)):
        stability = "text"
    return BridgeCase(ending, stability, prompt, completion, extension, options, full)


def _as_sampled(message: dict[str, Any], renderer: Renderer) -> dict[str, Any]:
    """The message as a model may have sampled it: text alone, not after calls, reasoning if asked."""
    if message["role"] != "assistant":
        return message
    content = message["content"]
    if isinstance(content, list):
        content = "".join([part["text"] for part in content if part["type"] == "text"])
    if message.get("tool_calls") and not renderer.profile.writes_content_before_results:
        content = None
    reasoning = renderer.profile.reasoning
    if reasoning is not None and reasoning.is_open(renderer.profile.generation_prompt):
        message = {"reasoning_content": "Because.", **message}
    return {**message, "content": content}


def _sampled(rendered: RenderedTokens, message: int) -> list[int]:
    spans = [span for span in rendered.spans if span.sampled and span.message == message]
    return rendered.token_ids[spans[0].start : spans[-1].stop] if spans else []


def _written(renderer: Renderer, rendered: RenderedTokens, message: int) -> list[int]:
    """Return the tokens of a turn that merges with its prompt as a model writes them, or of any answer."""
    ids, stops = rendered.token_ids, renderer.get_stop_token_ids()
    start = next((span.start for span in rendered.spans if span.message == message), len(ids))
    stop = next((at for at in range(start, len(ids)) if ids[at] in stops), len(ids))
    # White space before a turn may belong to its message, too.
    header, text = renderer.profile.generation_prompt, renderer.decode(ids[start:stop]).lstrip()
    said = text.removeprefix(header) if text.startswith(header) else "Fine."
    return [*renderer.tokenizer.encode(said), *(ids[stop : stop + 1] or stops[:1])]


def _difference(bridge: RenderedTokens, case: BridgeCase) -> tuple[str, str, str] | None:
    """Return the first difference with both sides, or None."""
    full, base = case.full, len(case.sampled)
    if bridge.token_ids[:base] != case.sampled:
        return "sampled tokens", str(bridge.token_ids[:base]), str(case.sampled)
    ours, theirs = bridge.multi_modal_data, full.multi_modal_data
    if case.stability == "text":
        text, reference = bridge.decode(), full.decode()
        start = common_prefix(text, reference)
        return None if text == reference else ("texts", text[start:], reference[start:])
    if case.stability == "tokens":
        if bridge.token_ids != full.token_ids:
            start = common_prefix(bridge.token_ids, full.token_ids)
            return "tokens", bridge.decode(start), full.decode(start)
        if ours.mm_hashes != theirs.mm_hashes or ours.mm_placeholders != theirs.mm_placeholders:
            return "media", str(ours.mm_placeholders), str(theirs.mm_placeholders)
        return None
    first = len(full.roles) - len(case.extension)
    new = _tokens_from(full, first, content=True)
    # After a cut-off, the close of the turn depends on the part that was cut.
    wanted = len(bridge) - (_tokens_from(bridge, 0) if case.ending == "cut off" else base)
    wanted = max(wanted, len(full) - new)
    if common_prefix(bridge.token_ids[::-1], full.token_ids[::-1]) < wanted:
        return "the new messages", bridge.decode(base), full.decode(len(full) - wanted)
    return None


def _tokens_from(rendered: RenderedTokens, message: int, *, content: bool = False) -> int:
    """Index of the first token of a message or a later one, or of their content."""
    kinds = CONTENT_KINDS if content else None
    return next(
        (
            span.start
            for span in rendered.spans
            if span.message >= message and (kinds is None or span.kind in kinds)
        ),
        len(rendered),
    )
