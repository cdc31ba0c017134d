"""Parity: our rendering against the reference's, on generated conversations, to the last bit.

Conversations are rendered by turns under the default rules for special tokens in content and under
`"parse"`, the reference's rule. If a rule makes a special token text, the reference would take it for syntax.
It gets a plain word instead. Then special tokens and images must be equal and, with the token put back, the
text. Everything else must be equal entirely.
"""

import json
import random
import re
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image

from mmrender.errors import MediaError, MissingDependencyError, MMRenderError, ProcessorError
from mmrender.media.pixels import ImageBackend
from mmrender.media.processors.adapted_audio import TOO_SHORT, AudioOnlyProcessor
from mmrender.media.processors.patch_videos import PatchVideoProcessor
from mmrender.media.processors.reference import INSTALL_TORCHVISION
from mmrender.messages import MODALITIES
from mmrender.renderer import Renderer
from mmrender.template.text import Author
from mmrender.testing.conversations import (
    Conversation,
    ConversationMaker,
    sample_clips,
    sample_images,
    sample_videos,
)
from mmrender.testing.difference import (
    Difference,
    first_difference,
    id_difference,
    range_difference,
    tensor_difference,
    text_difference,
)
from mmrender.testing.reference import ReferenceRenderer, has_reference_backend
from mmrender.testing.reports import Messages, Mismatch, Options, ParityReport
from mmrender.testing.shrinking import shrink
from mmrender.tokens.encode import SpecialTokenRule

_Rendered = TypeVar("_Rendered")

RULES = ("default", "parse")
"""Rules for special tokens in content, each checked in every second conversation."""

_UNLIKE_SHAPES = "stack expects each tensor to be equal size"
"""torch's error when a processor joins tensors of unlike images."""
_BY_ROLE = ("content", "reasoning_content")
"""Members of a message whose author is its role."""
_WORD = "zq{}q"
_WORDS = re.compile(r"zq(\d+)q")
"""The last letter joins no mark that follows it, in any normalizer."""
_FULL_WIDTH = {code: code + 0xFEE0 for code in range(0x21, 0x7F)}
"""NFKC, a normalizer of many tokenizers, makes these characters plain again."""


def check_parity(
    directory: Path,
    *,
    image_backend: ImageBackend,
    cases: int,
    seed: int = 0,
    pictures: Sequence[Image.Image] = (),
    progress: Callable[[], object] = lambda: None,
    trust_remote_code: bool = False,
) -> ParityReport:
    """Compare text, ids, tensors and placeholder ranges on generated conversations, up to a difference.

    A model that cannot be opened is reported as not compared.

    Args:
        directory: The model.
        image_backend: Our back end, and the reference's.
        cases: Number of conversations.
        seed: Of the generated conversations.
        pictures: Images to use in addition to generated ones.
        progress: Called after each conversation.
        trust_remote_code: Run code of the directory, on both sides.
    """
    report = ParityReport(directory.name, image_backend)
    began = time.perf_counter()
    try:
        pair = ParityPair(directory, image_backend, trust_remote_code=trust_remote_code)
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
    clips = sample_clips(source, 9) if pair.takes_audio else []
    documents = pair.renderers["default"].templates.find({}, has_tools=False).template.reads_documents
    maker = ConversationMaker(
        pair.profile,
        images,
        pair.literals,
        odd=True,
        documents=documents,
        accepts=pair.accepts,
        videos=videos,
        equal_frames=not pair.joins_videos,
        clips=clips,
    )
    for case in range(cases):
        # Two of four hold texts alone, one under each rule: most of the time goes into pictures.
        messages, options = maker.make(source, pictured=case % 4 < 2)
        rules = RULES[case % len(RULES)]
        difference = pair.difference(rules, messages, options, report)
        report.cases += 1
        progress()
        if difference is not None:
            report.mismatch = pair.smallest(case, rules, difference, messages, options)
            break
    if report.mismatch is None and report.refused == report.cases:
        report.not_compared = report.not_compared or "both sides refuse every conversation"
    elif report.mismatch is None and images and not report.images:
        report.not_compared = "no conversation held an image"
    elif report.mismatch is None and clips and not report.clips:
        report.not_compared = "no conversation held audio"
    report.without_videos, report.without_audio = pair.without_videos, pair.without_audio
    if len(videos) < len(samples):
        why = next(why for why in refusals if why is not None)
        left_out = len(samples) - len(videos)
        report.without_videos = f"{left_out} of {len(samples)}, which the reference refuses: {why}"
    report.seconds = time.perf_counter() - began
    return report


class ParityPair:
    """A model's renderers, one for each set of rules, and its reference.

    Attributes:
        profile: The findings about the model's template.
        literals: Special tokens as content may hold them, also in disguise.
        invented: Tokens that the reference's tokenizer adds and no file of the model has.
        takes_images: Whether the model takes images.
        without_images: Why its images cannot be compared, or None.
        takes_videos: Whether its videos are compared.
        without_videos: Why the videos that our side takes cannot be compared, or None.
        joins_videos: Whether the reference joins videos of unlike numbers of frames.
        takes_audio: Whether its audio is compared.
        without_audio: Why the audio that our side takes cannot be compared, or None.
    """

    def __init__(
        self, directory: Path, image_backend: ImageBackend, *, trust_remote_code: bool = False
    ) -> None:
        # First, since it makes torchvision importable if it can, and our adapter may run on it.
        self.reference = ReferenceRenderer(directory, image_backend, trust_remote_code=trust_remote_code)
        # The reference does not mention tools that a template leaves out.
        options: Any = {"memo_bytes": 0, "unprinted": "allow"}
        renderer = Renderer.from_pretrained(
            directory, image_backend=image_backend, trust_remote_code=trust_remote_code, **options
        )
        media = renderer.media
        parsing = Renderer(
            renderer.templates, renderer.tokenizer, media, content_special_tokens="parse", **options
        )
        self.renderers = dict(zip(RULES, (renderer, parsing), strict=True))
        self.profile = renderer.profile
        self._read_tokens(directory)
        self.takes_images = media is not None and not isinstance(media.processor, AudioOnlyProcessor)
        self.without_images = self._why_without_images(renderer)
        # A processor, rather than the tokenizer alone, may decide how text is encoded.
        affixes = media.processor.affixes("none", images=False) if media is not None else None
        if self.without_images is not None and (affixes is None or self.reference.processor is None):
            self.reference.read_text_alone(self.without_images)
        videos = media.processor.videos if media is not None else None
        self.without_videos = None if videos is None else self._why_without_videos(renderer)
        self.takes_videos = videos is not None and self.without_videos is None
        self.joins_videos = isinstance(videos, PatchVideoProcessor)
        audio = media.processor.audio if media is not None else None
        self.without_audio = None if audio is None else self._why_without_audio(renderer)
        self.takes_audio = audio is not None and self.without_audio is None
        placeholders = media.processor.placeholder_tokens if media is not None else frozenset[str]()
        self._words = {
            name: _Words(self.literals, placeholders, renderer.rules)
            for name, renderer in self.renderers.items()
        }

    def _read_tokens(self, directory: Path) -> None:
        """Find the reference's special tokens, and which of them the model's files name."""
        tokenizer = self.reference.tokenizer
        # Blanks are not syntax, also as SentencePiece spells them.
        added = {
            token: index
            for token, index in tokenizer.get_added_vocab().items()
            if token.replace("\u2581", "").strip()
        }
        self._unknown = tokenizer.unk_token_id
        self._syntax = frozenset(added.values()) - {self._unknown}
        # Each audio token asks for an input of audio.
        added.pop(getattr(self.reference.processor, "audio_token", None), None)
        text = "".join(path.read_text("utf-8") for path in sorted(directory.glob("*token*.json")))
        spellings = {
            token: {json.dumps(token, ensure_ascii=ascii)[1:-1] for ascii in (True, False)} for token in added
        }
        named = sorted(token for token in added if any(spelling in text for spelling in spellings[token]))
        self.invented = sorted(added.keys() - set(named))
        self.literals = [*named, *(token.translate(_FULL_WIDTH) for token in named)]

    def _why_without_images(self, renderer: Renderer) -> str | None:
        if renderer.media is None or isinstance(renderer.media.processor, AudioOnlyProcessor):
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
        return _refusal(self.renderers["default"], "x")

    def _why_without_videos(self, renderer: Renderer) -> str | None:
        if not self.reference.takes_videos:
            why = "the reference's video processor cannot be built here"
            return why if has_reference_backend("torch") else f"{why}. {INSTALL_TORCHVISION}"
        *_, video = sample_videos(random.Random(0), 3)
        return _refusal(renderer, [video])

    def _why_without_audio(self, renderer: Renderer) -> str | None:
        if not self.reference.takes_audio:
            return "the reference's feature extractor cannot be built here"
        return _refusal(renderer, [sample_clips(random.Random(0), 2)[1]])

    def reference_refusal(self, video: dict[str, Any]) -> str | None:
        """Return why the reference refuses a video without times that our side renders, or None."""
        messages = [{"role": "user", "content": [{key: video[key] for key in ("type", "video", "fps")}]}]
        theirs = _outcome(lambda: self.reference.render(messages))
        if not isinstance(theirs, Exception):
            return None
        ours = _outcome(lambda: self.renderers["default"].render(messages))
        return None if isinstance(ours, Exception) else f"{type(theirs).__name__}: {theirs}"

    def accepts(self, conversation: Conversation) -> bool:
        """Whether either side renders a conversation."""
        messages, options = conversation
        renderer = self.renderers["default"]
        parts = [part for message in messages for part in message["content"] or ()]
        # Without media, only the template can refuse.
        has_media = any(isinstance(part, dict) and part["type"] in MODALITIES for part in parts)
        ours = renderer.render if has_media else renderer.render_text
        theirs = self.reference.render if has_media else self.reference.text
        sides = (partial(ours, messages, **options), partial(theirs, self._in_form(messages), **options))
        return any(not isinstance(_outcome(render), Exception) for render in sides)

    def smallest(
        self, case: int, rules: str, difference: Difference, messages: Messages, options: Options
    ) -> Mismatch:
        """Return a mismatch with as little in it as differs in the same way."""

        def differs(candidate: Any) -> bool:
            other = bool(candidate["messages"]) and self.difference(rules, **candidate)
            return isinstance(other, Difference) and other.kind == difference.kind

        start = {"options": dict(options), "messages": list(messages)}
        small = shrink(start, lambda value: value.keys() == start.keys() and differs(value))
        return Mismatch(case, rules, self.difference(rules, **small) or difference, **small)

    def difference(
        self, rules: str, messages: Messages, options: Options, report: ParityReport | None = None
    ) -> Difference | None:
        """Return the first difference under one set of rules, or None if all is equal.

        `report` receives the counts of what was compared.
        """
        report = report or ParityReport("", "")
        theirs = self._in_form(messages)
        difference = self._difference(rules, messages, theirs, options, report)
        if difference is None or difference.what in ("acceptance", "text"):
            return difference
        ordered = self._in_written_order(theirs, options)
        if ordered is None:
            return difference
        report.reordered += 1
        return self._difference(rules, messages, ordered, options, ParityReport("", ""))

    def _difference(
        self, rules: str, messages: Messages, theirs: Messages, options: Options, report: ParityReport
    ) -> Difference | None:
        renderer, words = self.renderers[rules], self._words[rules]
        worded = words.written(theirs, options)
        is_replaced = worded != (theirs, options)
        ours = _outcome(lambda: renderer.render(messages, **options))
        expected = _outcome(lambda: self.reference.render(worded[0], **worded[1]))
        text = expected if isinstance(expected, Exception) else expected.text
        if is_replaced:
            text = _outcome(lambda: self.reference.text(theirs, **options))
        if isinstance(ours, MediaError) and ours.problem == TOO_SHORT:
            report.refusals[ours.problem] += 1  # the reference drops the clip without a word
            return None
        if isinstance(ours, Exception):
            refusal = expected if isinstance(expected, Exception) else text
            if not isinstance(ours, MMRenderError) or not isinstance(refusal, Exception):
                return _acceptance(ours, refusal)
            report.refusals[ours.problem] += 1
            return None
        if isinstance(expected, Exception):
            if not self._is_unjoined(messages) and _UNLIKE_SHAPES not in str(expected):
                return _acceptance(ours, expected)
            report.unjoined += 1
            return text_difference(
                ours.text or "", str(_outcome(lambda: self.reference.text(theirs, **options)))
            )
        if isinstance(text, Exception):
            return _acceptance(ours, text)
        report.replaced += is_replaced
        report.tokens += len(ours)
        items = ours.multi_modal_data.mm_items
        report.images += len(items.get("image", ()))
        report.videos += len(items.get("video", ()))
        report.clips += len(items.get("audio", ()))
        if not is_replaced:
            return first_difference(renderer, ours, expected, report.values)
        difference = text_difference(ours.text or "", text)
        if difference is None and words.put_back(expected.text) != text:
            # The template itself looks for the token, so a rendering of the word proves nothing.
            report.unjudged += 1
            return range_difference(renderer, ours)
        return (
            difference
            or self._syntax_difference(renderer, words, ours.token_ids, expected.ids)
            or range_difference(renderer, ours)
            or tensor_difference(ours, expected, report.values)
        )

    def _is_unjoined(self, messages: Messages) -> bool:
        """Whether videos differ in their number of frames, which the reference may not join."""
        parts = [part for message in messages for part in message["content"] or ()]
        counts = {len(part["video"]) for part in parts if isinstance(part, dict) and "video" in part}
        return len(counts) > 1 and not self.joins_videos

    def _in_form(self, messages: Messages) -> list[dict[str, Any]]:
        """Return messages in the form that the template takes, which only our side chooses by itself."""
        form = self.profile.form
        out = [dict(message) for message in messages]
        for message in out:
            if message.get("content") is None and form.none_content == "empty":
                message["content"] = ""
            elif message.get("content") is None and form.none_content == "absent":
                message.pop("content", None)
            if isinstance(message.get("content"), str) and form.content == "list":
                message["content"] = [{"type": "text", "text": message["content"]}]
            if "tool_calls" in message and form.arguments == "json":
                message["tool_calls"] = [_with_json_arguments(call) for call in message["tool_calls"]]
        return out

    def _in_written_order(self, messages: Messages, options: Options) -> list[dict[str, Any]] | None:
        """Return messages with images in the order of the template, or None if they are in it already.

        The reference pairs the first placeholder with the first image, whichever part the template wrote it
        for. A word in the place of each image shows the order.
        """
        contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
        pictures = [part for parts in contents for part in parts if part["type"] == "image"]
        words = iter([{"type": "text", "text": _WORD.format(index)} for index in range(len(pictures))])
        text = _outcome(lambda: self.reference.text(_with_images(messages, words), **options))
        order = [int(word) for word in _WORDS.findall(text)] if isinstance(text, str) else []
        if order == sorted(order) or sorted(order) != list(range(len(pictures))):
            return None
        return _with_images(messages, iter([pictures[index] for index in order]))

    def _syntax_difference(
        self, renderer: Renderer, words: "_Words", ours: Sequence[int], theirs: Sequence[int]
    ) -> Difference | None:
        """Compare the special tokens and the decoded texts, if the reference has words for tokens."""
        tokens = [[index for index in ids if index in self._syntax] for ids in (ours, theirs)]
        if tokens[0] != tokens[1]:
            return id_difference(renderer, tokens[0], tokens[1], "special tokens")
        if self._unknown in (*ours, *theirs):
            return None  # Characters outside the vocabulary are lost on both sides.
        text, expected = (_squeezed(renderer.decode(ids)) for ids in (ours, theirs))
        return text_difference(text, words.put_back(expected, _squeezed), "decoded text")


class _Words:
    """Plain words in place of the special tokens that are text under some rules.

    Args:
        literals: The tokens.
        media: The tokens that are text under all rules.
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
        worded = []
        for message in messages:
            by_role = {key: message[key] for key in _BY_ROLE if key in message}
            rest = {key: value for key, value in message.items() if key not in by_role}
            worded.append({**self._replaced(rest, "caller"), **self._replaced(by_role, message["role"])})
        return worded, self._replaced(dict(options), "caller")

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

    def put_back(self, text: str, spell: Callable[[str], str] = str) -> str:
        """Return a text with tokens for words, each token as `spell` returns it."""
        return _WORDS.sub(lambda match: spell(self._literals[int(match.group(1))]), text)


def _with_images(messages: Messages, parts: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with other parts in the places of their images."""
    out = [dict(message) for message in messages]
    for message in out:
        if isinstance(message.get("content"), list):
            message["content"] = [
                next(parts) if part["type"] == "image" else part for part in message["content"]
            ]
    return out


def _with_json_arguments(call: dict[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


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


def _refusal(renderer: Renderer, content: Any) -> str | None:
    """Return why no message with this content is processed here. Other errors may be the template's."""
    outcome = _outcome(lambda: renderer.render([{"role": "user", "content": content}]))
    return str(outcome) if isinstance(outcome, ProcessorError | MissingDependencyError) else None


def _acceptance(*sides: object) -> Difference:
    """Return the difference of two sides of which one raised an error."""
    return Difference(
        "acceptance",
        *(f"{type(side).__name__}: {side}" if isinstance(side, Exception) else "renders" for side in sides),
    )
