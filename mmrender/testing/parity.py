"""Parity: our rendering against the reference's, on generated conversations, to the last bit.

Conversations are rendered by turns under the default rules for special tokens in content and under
`"parse"`, the reference's rule. Where a rule makes such a token text, the reference would take it for
syntax; there it gets a plain word instead, and must give the same special tokens and images as ours and,
with the token put back, the same text. All else must be equal entirely.
"""

import json
import random
import re
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from PIL import Image

from mmrender.errors import MMRenderError, ProcessorError
from mmrender.media.pixels import ImageBackend
from mmrender.media.processors.patches import PatchVideoProcessor
from mmrender.renderer import Renderer
from mmrender.sidecar import Repeat
from mmrender.template.text import Author
from mmrender.testing.conversations import Conversation, ConversationMaker, sample_images, sample_videos
from mmrender.testing.reference import ReferenceRenderer, ReferenceRendering
from mmrender.testing.shrinking import shrink
from mmrender.tokens.encode import SpecialTokenRule
from mmrender.tokens.rendered import RenderedTokens

Messages: TypeAlias = Sequence[dict[str, Any]]
Options: TypeAlias = Mapping[str, Any]

_Rendered = TypeVar("_Rendered")

RULES = ("default", "parse")
"""Rules for special tokens in content, each checked in every second conversation."""

_UNLIKE = "stack expects each tensor to be equal size"
"""What torch says of tensors of several images that a processor wants to join."""
_SAID_BY_ROLE = ("content", "reasoning_content")
_WORD = "zq{}q"
_WORDS = re.compile(r"zq(\d+)q")
"""Their last letter makes no other one with a mark that follows, whatever the normalizer."""
_FULL_WIDTH = {code: code + 0xFEE0 for code in range(0x21, 0x7F)}
"""NFKC, a normalizer of many tokenizers, makes these characters plain ones again."""


class Difference(NamedTuple):
    """What differs, and both sides as a person can read them."""

    what: str
    ours: str
    reference: str

    @property
    def kind(self) -> tuple[str, ...]:
        """What another conversation must share to differ in the same way."""
        is_error = self.what == "acceptance"
        return (self.what, *(side.partition(":")[0] for side in self[1:])) if is_error else (self.what,)


@dataclass(frozen=True)
class Mismatch:
    """The first difference, in the smallest conversation found that shows it.

    Attributes:
        case: Number of the conversation that it was found in, before it was made smaller.
        rules: `"default"` or `"parse"`, the value of `content_special_tokens`.
        difference: What differs.
        messages: The conversation.
        options: The other arguments of `render`.
    """

    case: int
    rules: str
    difference: Difference
    messages: Messages
    options: Options


@dataclass
class ParityReport:
    """Outcome for one model and one image back end.

    Attributes:
        cases: Conversations made: those compared, and those that both sides refused.
        refusals: How often both sides refused a conversation, by what ours said.
        replaced: How many held special tokens that a rule makes text.
        unjudged: How many of these were compared in text and placeholder ranges alone, since their template
            looks for the token.
        unjoined: How many hold images or videos that the reference cannot join, and were compared in text
            alone.
        reordered: How many were compared with the reference's images in the order that the template writes
            them in, which is not that of the messages.
        images: Images compared.
        videos: Videos compared.
        tokens: Token ids compared.
        pixel_values: Number of pixel values compared, all of which were equal.
        seconds: How long it took, the opening of both sides included.
        invented: Tokens that the reference adds, and that no file of the model has: no text holds them.
        not_compared: Why something that the model takes, such as images, was left out; or None.
        mismatch: The first difference, or None.
        without_videos: Why videos that our side takes were left out, all or some, or None.
    """

    model: str
    image_backend: str
    cases: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    replaced: int = 0
    unjudged: int = 0
    unjoined: int = 0
    reordered: int = 0
    images: int = 0
    videos: int = 0
    tokens: int = 0
    pixel_values: int = 0
    seconds: float = 0.0
    invented: Sequence[str] = ()
    not_compared: str | None = None
    mismatch: Mismatch | None = None
    without_videos: str | None = None

    @property
    def refused(self) -> int:
        """How many conversations both sides refused."""
        return self.refusals.total()

    @property
    def compared(self) -> int:
        """How many conversations were rendered by both sides."""
        return self.cases - self.refused

    @property
    def outcome(self) -> Literal["equal", "differs", "not compared"]:
        """`"equal"` only where everything that the model takes was compared."""
        if self.mismatch is not None:
            return "differs"
        return "equal" if self.not_compared is None else "not compared"

    def counts(self) -> dict[str, Any]:
        """Return everything but the mismatch, for JSON."""
        names = [entry.name for entry in fields(self) if entry.name != "mismatch"]
        return {"outcome": self.outcome, **{name: getattr(self, name) for name in names}}

    def notes(self) -> list[str]:
        """Return what limits the comparison, a line each."""
        found = [f"{count} refused by both: {why}" for why, count in self.refusals.most_common()]
        if self.unjudged:
            found.append(f"{self.unjudged} of a template that looks for a token: text and ranges alone")
        if self.unjoined:
            found.append(f"{self.unjoined} of images or videos that the reference cannot join: text alone")
        if self.reordered:
            found.append(f"{self.reordered} with the reference's images in the order of the template")
        if self.without_videos:
            found.append(f"without videos: {self.without_videos}")
        if self.invented:
            found.append(
                f"the reference adds {', '.join(self.invented)}, in no file of the model and no text"
            )
        return found


def check_parity(
    directory: Path,
    *,
    image_backend: ImageBackend,
    cases: int,
    seed: int = 0,
    pictures: Sequence[Image.Image] = (),
    progress: Callable[[], object] = lambda: None,
) -> ParityReport:
    """Compare text, ids, tensors and placeholder ranges on generated conversations; stop at a difference.

    `image_backend` is compared with the reference's back end of the same name. `pictures` are used beside
    generated ones, and `progress` is called after each of the `cases`. A model that cannot be opened is
    reported as not compared.
    """
    report = ParityReport(directory.name, image_backend)
    began = time.perf_counter()
    try:
        pair = ParityPair(directory, image_backend)
    except MMRenderError as error:
        report.not_compared = f"{type(error).__name__}: {error}"
        return report
    source = random.Random(seed)
    report.not_compared, report.invented = pair.without_images, pair.invented
    if pair.without_images and (why := pair.without_text()) is not None:
        report.not_compared = f"{pair.without_images}; {why}"
        return report
    images = [] if pair.without_images or not pair.takes_images else [*sample_images(source, 10), *pictures]
    samples = sample_videos(source, 8) if images and pair.takes_videos else []
    refusals = [pair.reference_refusal(video) for video in samples]
    videos = [video for video, why in zip(samples, refusals, strict=True) if why is None]
    documents = pair.renderers["default"].templates.find({}, has_tools=False).template.reads_documents
    maker = ConversationMaker(
        pair.profile,
        images,
        pair.literals,
        odd=True,
        documents=documents,
        accepts=pair.accepts,
        videos=videos,
        alike=not pair.joins_videos,
    )
    for case in range(cases):
        # Two of four hold texts alone, one under each rule: pictures take most of the time.
        messages, options = maker.make(source, pictured=case % 4 < 2)
        rules = RULES[case % len(RULES)]
        found = pair.difference(rules, messages, options, report)
        report.cases += 1
        progress()
        if found is not None:
            report.mismatch = pair.smallest(case, rules, found, messages, options)
            break
    if report.mismatch is None and report.refused == report.cases:
        report.not_compared = report.not_compared or "both sides refuse every conversation"
    elif report.mismatch is None and images and not report.images:
        report.not_compared = "no conversation held an image"
    report.without_videos = pair.without_videos
    if len(videos) < len(samples):
        why = next(why for why in refusals if why is not None)
        report.without_videos = (
            f"{len(samples) - len(videos)} of {len(samples)}, which the reference refuses: {why}"
        )
    report.seconds = time.perf_counter() - began
    return report


class ParityPair:
    """A model's renderers, one for each set of rules, and its reference.

    Attributes:
        profile: What the model's template takes.
        literals: Special tokens as content may hold them, also in disguise.
        invented: Those that the reference's tokenizer adds, and that no file of the model has.
        takes_images: Whether the model is one for images.
        without_images: Why its images cannot be compared, or None.
        takes_videos: Whether its videos are compared.
        without_videos: Why the videos that our side takes cannot be compared, or None.
        joins_videos: Whether the reference joins videos of unlike numbers of frames.
    """

    def __init__(self, directory: Path, image_backend: ImageBackend) -> None:
        # First, since it makes torchvision importable where it can, and our adapter may run on it.
        self.reference = ReferenceRenderer(directory, image_backend)
        # The reference says nothing of tools that a template leaves out.
        options: Any = {"memo_bytes": 0, "unprinted": "allow"}
        renderer = Renderer.from_pretrained(directory, image_backend=image_backend, **options)
        parts = renderer.templates, renderer.tokenizer, renderer.media
        parsing = Renderer(*parts, content_special_tokens="parse", **options)
        self.renderers = {RULES[0]: renderer, RULES[1]: parsing}
        self.profile = renderer.profile
        tokenizer = self.reference.tokenizer
        # Blanks are no syntax, also as SentencePiece spells them.
        added = {
            token: index
            for token, index in tokenizer.get_added_vocab().items()
            if token.replace("\u2581", "").strip()
        }
        self._syntax = frozenset(added.values()) - {tokenizer.unk_token_id}
        added.pop(
            getattr(self.reference.processor, "audio_token", None), None
        )  # each asks for an audio input
        self._unknown = tokenizer.unk_token_id
        files = "".join(path.read_text("utf-8") for path in sorted(directory.glob("*token*.json")))
        self.invented = [
            token
            for token in sorted(added)
            if not any(json.dumps(token, ensure_ascii=ascii)[1:-1] in files for ascii in (True, False))
        ]
        for token in self.invented:
            del added[token]
        self.literals = [*sorted(added), *(token.translate(_FULL_WIDTH) for token in sorted(added))]
        self.takes_images = renderer.media is not None
        self.without_images = self._why_without_images(renderer)
        if self.without_images is not None and not self._asks_processor_for_text(renderer):
            self.reference.read_text_alone(self.without_images)
        videos = renderer.media.processor.videos if renderer.media is not None else None
        self.without_videos = None if videos is None else self._why_without_videos(renderer)
        self.takes_videos = videos is not None and self.without_videos is None
        self.joins_videos = isinstance(videos, PatchVideoProcessor)
        media = (
            renderer.media.processor.placeholder_tokens if renderer.media is not None else frozenset[str]()
        )
        self._words = {
            name: _Words(self.literals, media, renderer.rules) for name, renderer in self.renderers.items()
        }

    def _why_without_images(self, renderer: Renderer) -> str | None:
        if renderer.media is None:
            return None
        try:
            renderer.media.require_processor("images")
        except MMRenderError as error:
            return str(error)
        if self.reference.processor is None:
            return self.reference.processor_missing
        return None if self.profile.image_roles else "the template writes no placeholder for an image"

    def without_text(self) -> str | None:
        """Return why prompts without images are refused, or None."""
        ours = _outcome(lambda: self.renderers[RULES[0]].render([{"role": "user", "content": "x"}]))
        return str(ours) if isinstance(ours, ProcessorError) else None

    def _asks_processor_for_text(self, renderer: Renderer) -> bool:
        """Whether the model's processor, rather than its tokenizer alone, says what text becomes."""
        media = renderer.media
        known = media.processor.affixes("none", images=False) if media is not None else None
        return known is not None and self.reference.processor is not None

    def _why_without_videos(self, renderer: Renderer) -> str | None:
        if not self.reference.takes_videos:
            return "the reference's video processor cannot be built here"
        *_, video = sample_videos(random.Random(0), 3)
        try:
            renderer.render([{"role": "user", "content": [video]}])
        except ProcessorError as error:
            return str(error)
        except MMRenderError:
            pass  # The template may take none there.
        return None

    def reference_refusal(self, video: dict[str, Any]) -> str | None:
        """Return why the reference refuses a video without times that our side renders, or None."""
        messages = [{"role": "user", "content": [{key: video[key] for key in ("type", "video", "fps")}]}]
        theirs = _outcome(lambda: self.reference.render(messages))
        if not isinstance(theirs, Exception):
            return None
        ours = _outcome(lambda: self.renderers[RULES[0]].render(messages))
        return None if isinstance(ours, Exception) else f"{type(theirs).__name__}: {theirs}"

    def accepts(self, conversation: Conversation) -> bool:
        """Whether either side renders a conversation."""
        messages, options = conversation
        renderer, given = self.renderers["default"], self._as_template_takes(messages)
        parts = [part for message in messages for part in message["content"] or ()]
        # Only where there are images can more go wrong than the template.
        is_pictured = any(isinstance(part, dict) and part["type"] in ("image", "video") for part in parts)
        sides = (
            (renderer.render if is_pictured else renderer.render_text, messages),
            (self.reference.render if is_pictured else self.reference.text, given),
        )
        return any(
            not isinstance(_outcome(partial(render, shown, **options)), Exception) for render, shown in sides
        )

    def smallest(
        self, case: int, rules: str, found: Difference, messages: Messages, options: Options
    ) -> Mismatch:
        """Return a mismatch with as little in it as differs in the same way."""

        def differs(candidate: Any) -> bool:
            other = bool(candidate["messages"]) and self.difference(rules, **candidate)
            return isinstance(other, Difference) and other.kind == found.kind

        start = {"options": dict(options), "messages": list(messages)}
        least = shrink(start, lambda value: value.keys() == start.keys() and differs(value))
        return Mismatch(case, rules, self.difference(rules, **least) or found, **least)

    def difference(
        self, rules: str, messages: Messages, options: Options, report: ParityReport | None = None
    ) -> Difference | None:
        """Return in what the two differ first under one set of rules; None where all is equal.

        `report` takes the counts of what was compared.
        """
        given = self._as_template_takes(messages)
        found = self._difference(rules, messages, given, options, report)
        if found is None or found.what in ("acceptance", "text"):
            return found
        written = self._in_written_order(given, options)
        if written is None:
            return found
        if report is not None:
            report.reordered += 1
        return self._difference(rules, messages, written, options, None)

    def _difference(
        self,
        rules: str,
        messages: Messages,
        given: list[dict[str, Any]],
        options: Options,
        report: ParityReport | None,
    ) -> Difference | None:
        renderer, words = self.renderers[rules], self._words[rules]
        worded = words.written(given, options)
        is_replaced = worded != (given, options)
        ours = _outcome(lambda: renderer.render(messages, **options))
        theirs = _outcome(lambda: self.reference.render(worded[0], **worded[1]))
        text = theirs if isinstance(theirs, Exception) else theirs.text
        if is_replaced:
            text = _outcome(lambda: self.reference.text(given, **options))
        is_unjoined = isinstance(theirs, Exception) and (
            self._is_unjoined(messages) or _UNLIKE in str(theirs)
        )
        if is_unjoined and not isinstance(ours, Exception):
            if report is not None:
                report.unjoined += 1
            text = str(_outcome(lambda: self.reference.text(given, **options)))
            return _text_difference(ours.text, text) if ours.text != text else None
        if isinstance(ours, Exception) or isinstance(theirs, Exception) or isinstance(text, Exception):
            refused = theirs if isinstance(theirs, Exception) else text
            return _refusal(ours, refused, report)
        if report is not None:
            report.replaced += is_replaced
            report.tokens += len(ours)
            report.images += len(ours.multi_modal_data.mm_items.get("image", ()))
            report.videos += len(ours.multi_modal_data.mm_items.get("video", ()))
        if not is_replaced:
            return first_difference(renderer, ours, theirs, report)
        if ours.text != text:
            return _text_difference(ours.text, text)
        if words.put_back(theirs.text) != text:
            # The template itself looked for the token, so its rendering of the word says nothing.
            if report is not None:
                report.unjudged += 1
            return _range_difference(renderer, ours)
        return (
            self._syntax_difference(renderer, words, ours.token_ids, theirs.ids)
            or _range_difference(renderer, ours)
            or _tensor_difference(ours, theirs, report)
        )

    def _is_unjoined(self, messages: Messages) -> bool:
        """Whether videos differ in their number of frames, which the reference may not join."""
        parts = [part for message in messages for part in message["content"] or ()]
        counts = {len(part["video"]) for part in parts if isinstance(part, dict) and "video" in part}
        return len(counts) > 1 and not self.joins_videos

    def _as_template_takes(self, messages: Messages) -> list[dict[str, Any]]:
        """Return messages in the shapes that the template takes, which only our side chooses by itself."""
        form = self.profile.form
        given = [dict(message) for message in messages]
        for message in given:
            if message.get("content") is None and form.none_content == "empty":
                message["content"] = ""
            elif message.get("content") is None and form.none_content == "absent":
                message.pop("content", None)
            if isinstance(message.get("content"), str) and form.content == "list":
                message["content"] = [{"type": "text", "text": message["content"]}]
            if "tool_calls" in message and form.arguments == "json":
                message["tool_calls"] = [
                    {
                        **call,
                        "function": {
                            **function,
                            "arguments": json.dumps(function["arguments"], ensure_ascii=False),
                        },
                    }
                    for call in message["tool_calls"]
                    for function in [call["function"]]
                ]
        return given

    def _in_written_order(
        self, messages: list[dict[str, Any]], options: Options
    ) -> list[dict[str, Any]] | None:
        """Return messages with images in the order that the template writes them in; None where they are.

        The reference gives the first placeholder the first image, whichever part the template wrote it for.
        A word in the place of each image tells where that one goes.
        """
        contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
        pictures = [part["image"] for parts in contents for part in parts if part["type"] == "image"]
        words = iter([{"type": "text", "text": _WORD.format(index)} for index in range(len(pictures))])
        text = _outcome(lambda: self.reference.text(_with_images(messages, words), **options))
        order = [int(word) for word in _WORDS.findall(text)] if isinstance(text, str) else []
        if order == sorted(order) or sorted(order) != list(range(len(pictures))):
            return None
        return _with_images(messages, iter([{"type": "image", "image": pictures[index]} for index in order]))

    def _syntax_difference(
        self, renderer: Renderer, words: "_Words", ours: Sequence[int], theirs: Sequence[int]
    ) -> Difference | None:
        """Compare the special tokens, and what both decode to, where theirs has words for tokens."""
        found = [[index for index in ids if index in self._syntax] for ids in (ours, theirs)]
        if found[0] != found[1]:
            return _id_difference("special tokens", renderer, *found)
        if self._unknown in (*ours, *theirs):
            return None  # What is not in the vocabulary is lost on both sides.
        said, expected = (_squeezed(renderer.decode(ids)) for ids in (ours, theirs))
        expected = words.put_back(expected, _squeezed)
        return _text_difference(said, expected, "decoded text") if said != expected else None


class _Words:
    """Plain words in place of the special tokens that are text under some rules.

    Args:
        literals: The tokens.
        media: Those that are text under all rules.
        rules: By author, as of a renderer.
    """

    def __init__(
        self, literals: Sequence[str], media: frozenset[str], rules: Mapping[Author, SpecialTokenRule]
    ) -> None:
        self._literals = literals
        self._words = {literal: _WORD.format(index) for index, literal in enumerate(literals)}
        disguised = {token.translate(_FULL_WIDTH) for token in media}
        patterns = {
            "text": _any_of(literals),
            "parse": _any_of([token for token in literals if token in media or token in disguised]),
        }
        self._patterns = {author: patterns[rule] for author, rule in rules.items()}

    def written(self, messages: Messages, options: Options) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return a conversation and its options with words for tokens."""
        written = []
        for message in messages:
            by_role = {key: message[key] for key in _SAID_BY_ROLE if key in message}
            rest = {key: value for key, value in message.items() if key not in by_role}
            written.append({**self._replaced(rest, "caller"), **self._replaced(by_role, message["role"])})
        return written, self._replaced(dict(options), "caller")

    def _replaced(self, value: Any, author: Author) -> Any:
        if isinstance(value, str):
            return self._patterns[author].sub(lambda match: self._words[match.group()], value)
        if isinstance(value, list):
            return [self._replaced(item, author) for item in value]
        if isinstance(value, dict):
            return {
                self._replaced(key, author): item if key in ("role", "type") else self._replaced(item, author)
                for key, item in value.items()
            }
        return value

    def put_back(self, text: str, shown: Callable[[str], str] = str) -> str:
        """Return a text with tokens for words, each token as `shown` gives it."""
        return _WORDS.sub(lambda match: shown(self._literals[int(match.group(1))]), text)


def _with_images(messages: Messages, parts: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with other parts in the places of their images."""
    return [
        {
            **message,
            "content": [next(parts) if part["type"] == "image" else part for part in message["content"]],
        }
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _any_of(tokens: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")


def _squeezed(text: str) -> str:
    """Return a text without blanks, as any normalizer leaves it."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def _outcome(render: Callable[[], _Rendered]) -> _Rendered | Exception:
    try:
        return render()
    except Exception as error:  # noqa: BLE001 - templates and Transformers raise anything
        return error


def _refusal(ours: object, theirs: object, report: ParityReport | None) -> Difference | None:
    """Return a difference unless both sides refuse, ours with an error of our tree."""
    sides = [
        f"{type(side).__name__}: {side}" if isinstance(side, Exception) else "renders"
        for side in (ours, theirs)
    ]
    if isinstance(ours, MMRenderError) and isinstance(theirs, Exception):
        if report is not None:
            report.refusals[ours.problem] += 1
        return None
    return Difference("acceptance", *sides)


def first_difference(
    renderer: Renderer,
    ours: RenderedTokens,
    expected: ReferenceRendering,
    report: ParityReport | None = None,
) -> Difference | None:
    """First difference, and both sides of it; None where all is equal. `report` counts pixel values."""
    if ours.text != expected.text:
        return _text_difference(ours.text, expected.text)
    if ours.token_ids != expected.ids:
        return _id_difference("token ids", renderer, ours.token_ids, expected.ids)
    return _range_difference(renderer, ours) or _tensor_difference(ours, expected, report)


def _text_difference(ours: str, theirs: str, what: str = "text") -> Difference:
    start = _first_unequal(ours, theirs)
    return Difference(what, *(repr(text[max(0, start - 40) : start + 80]) for text in (ours, theirs)))


def _id_difference(what: str, renderer: Renderer, ours: Sequence[int], theirs: Sequence[int]) -> Difference:
    start = max(0, _first_unequal(ours, theirs) - 5)
    sides = (ids[start : start + 15] for ids in (ours, theirs))
    return Difference(what, *(f"[{start}:] {ids} {renderer.decode(ids)!r}" for ids in sides))


def _range_difference(renderer: Renderer, ours: RenderedTokens) -> Difference | None:
    """Require that the ranges name exactly the feature tokens that the ids hold."""
    spans = ours.multi_modal_data.spans(len(ours))
    pieces = [piece for span in spans for piece in span.item.expansion]
    feature_ids = {
        renderer.tokenizer.token_id(piece.token)
        for piece in pieces
        if isinstance(piece, Repeat) and piece.embeds
    }
    in_ids = [index for index, token_id in enumerate(ours.token_ids) if token_id in feature_ids]
    named = [index for span in spans for index in (np.flatnonzero(span.range.is_embed) + span.start).tolist()]
    return Difference("placeholder ranges", str(named[:20]), str(in_ids[:20])) if named != in_ids else None


def _first_unequal(left: Sequence[Any], right: Sequence[Any]) -> int:
    pairs = zip(left, right, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _tensor_difference(
    rendered: RenderedTokens, expected: ReferenceRendering, report: ParityReport | None
) -> Difference | None:
    """Compare the tensors of every item with its part of the reference's batch."""
    spans = rendered.multi_modal_data.spans()
    if not spans:
        return None
    tensors = [span.item.tensors("float32") for span in spans]
    if report is not None:
        pixels = ("pixel_values", "pixel_values_videos")
        report.pixel_values += sum(entry[key].size for entry in tensors for key in pixels if key in entry)
    held = {key: [entry[key] for entry in tensors if key in entry] for entry in tensors for key in entry}
    # No item holds the number of images, or what is aligned to the tokens and follows from ids and ranges.
    counts = {len(spans), *map(len, rendered.multi_modal_data.mm_items.values())}
    reference = {
        key: value
        for key, value in expected.tensors.items()
        if key in held
        or (not (value.shape == (1,) and value[0] in counts) and value.shape[:2] != (1, len(expected.ids)))
    }
    for key in {**reference, **held}:
        if key not in held:
            return Difference(f"tensor {key}", "absent", f"shape {reference[key].shape}")
        ours = held[key]
        if key not in expected.tensors:
            return Difference(f"tensor {key}", f"shape {ours[0].shape}", "absent")
        theirs = reference[key]
        parts = _parts(ours, theirs)
        if parts is None:
            return Difference(f"shape of {key}", str([each.shape for each in ours]), str(theirs.shape))
        for own, part in zip(ours, parts, strict=True):
            if not np.array_equal(own, part):
                worst = float(np.abs(own.astype(np.float64) - part.astype(np.float64)).max())
                left = f"{own.dtype}, first {own.ravel()[:4]}"
                return Difference(key, left, f"{part.dtype}, largest difference {worst:g}")
    return None


def _parts(ours: Sequence[npt.NDArray[Any]], theirs: npt.NDArray[Any]) -> list[npt.NDArray[Any]] | None:
    """Cut a batch into the parts of its items, without padding; None where it cannot be one of such items.

    Most families join images on the first axis; some count samples there, and the tiles of all images on the
    second. Further axes are padded with one value to the largest image.
    """
    for axis in range(min(2, theirs.ndim)):
        lengths = [own.shape[axis] for own in ours if own.ndim == theirs.ndim]
        if len(lengths) < len(ours) or sum(lengths) != theirs.shape[axis]:
            continue
        pieces = np.split(theirs, np.cumsum(lengths)[:-1], axis)
        if all(own.shape == piece.shape for own, piece in zip(ours, pieces, strict=True)):
            return pieces
        parts = [piece[tuple(map(slice, own.shape))] for own, piece in zip(ours, pieces, strict=True)]
        rest = np.ones(theirs.shape, bool)
        for own, places in zip(ours, np.split(rest, np.cumsum(lengths)[:-1], axis), strict=True):
            places[tuple(map(slice, own.shape))] = False
        fits = all(own.shape == part.shape for own, part in zip(ours, parts, strict=True))
        if fits and len(np.unique(theirs[rest])) < 2:
            return parts
    return None
