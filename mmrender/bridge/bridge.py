"""From one turn to the next without touching what was sampled: previous ids verbatim, then a derived tail.

The tail is what the template writes after an assistant's content when the new messages follow it. It comes
from a skeleton, a short conversation that ends in the new messages, so its cost grows with the extension
alone. That the tail does not depend on what came before is proved once for each shape of extension; where it
is not so, there is no bridge, and the reason has a name.
"""

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from mmrender.bridge.histories import History as ProbedHistory
from mmrender.bridge.histories import MediaCount, skeleton
from mmrender.bridge.joint import Joint, TokenIds
from mmrender.bridge.proof import Proof, Prover
from mmrender.bridge.shape import reads_of, shape_of
from mmrender.bridge.tail import NotBridged, Tail, TailFinder, rest_of
from mmrender.errors import InputError, SpecialTokenError, TemplateError
from mmrender.messages import Message
from mmrender.probing.profile import TemplateProfile
from mmrender.probing.store import Shelf
from mmrender.rendering.placement import MediaPlace, check_placement, media_places
from mmrender.spans import MediaItem, MultiModalData
from mmrender.template.chat import ChatTemplate
from mmrender.template.ownership import disown_prompt
from mmrender.template.traced import TracedStr, plain
from mmrender.tokens.encode import Layout, TokenWriter
from mmrender.tokens.rendered import RenderedTokens, TokenSpan

__all__ = ["Bridge", "History", "NotBridged", "Resolve", "TokenIds"]

History: TypeAlias = Literal["sampled", "template"]
"""`sampled` keeps earlier turns as they were sampled; `template` gives no bridge where the template would now
write them differently."""

Resolve: TypeAlias = Callable[[Sequence[MediaPlace], int], Sequence[MediaItem | None]]

_FIRST_NEW = 2
"""Index of the first new message in a skeleton."""
_MAX_PROOFS = 4096


@dataclass(frozen=True, slots=True)
class _Turn:
    """What is given: the previous prompt with its sidecar, what was sampled, and what follows."""

    prompt: Sequence[int]
    completion: Sequence[int]
    messages: Sequence[Message]
    previous: MultiModalData


class Bridge:
    """Bridges turns of one template with one set of template arguments. Safe to use from many threads.

    Args:
        template: The chat template.
        profile: What is known about it.
        writer: Encodes the tail.
        stop_ids: Tokens that end an assistant's turn.
        arguments: Template variables.
        shelf: Where proofs are kept on disk, or None.
    """

    def __init__(
        self,
        template: ChatTemplate,
        profile: TemplateProfile,
        writer: TokenWriter,
        *,
        stop_ids: frozenset[int],
        arguments: Mapping[str, Any],
        shelf: Shelf | None = None,
    ) -> None:
        self._template = template
        self._profile = profile
        self._writer = writer
        self._stop_ids = stop_ids
        self._arguments = dict(arguments)
        self._reads = reads_of(template.syntax_tree())
        self._prover = Prover(self._independent_part, self._text, profile, self._reads)
        self._tails = TailFinder(writer, profile, stop_ids)
        self._joint = Joint(self._text, profile, self._tails, writer.tokenizer.decode)
        self._shelf = shelf
        self._setting = repr((sorted(stop_ids), sorted(writer.rules.items()), sorted(writer.media_tokens)))
        self._proofs: dict[Any, Proof] = {}
        self._lock = threading.Lock()

    def extend(
        self,
        prompt_ids: TokenIds,
        completion_ids: TokenIds,
        new_messages: Sequence[Message],
        *,
        previous: MultiModalData,
        history: History,
        resolve: Resolve,
        depends_on_company: bool,
    ) -> RenderedTokens:
        """Append the new messages and the generation prompt.

        Args:
            prompt_ids: What the model was asked with.
            completion_ids: What it sampled.
            new_messages: The extension.
            previous: Sidecar of the prompt.
            history: Whether earlier turns may differ from what the template would write now.
            resolve: Turns new media parts into items, given the number of earlier images.
            depends_on_company: Whether the model treats an image differently when others follow.

        Raises:
            NotBridged: It cannot be proved that appending is right.
            InputError: The ids are not token ids, or the sidecar is of another prompt.
            PlaceholderError: The template drops a new image.
            SpecialTokenError: New content holds a special token, and its role is set to `error`.
            MediaError: A new image cannot be loaded or processed.
        """
        _check_extension(new_messages, depends_on_company)
        prompt = _as_list(prompt_ids, "previous_prompt_ids")
        completion = _as_list(completion_ids, "previous_completion_ids")
        previous.spans(len(prompt), where="previous_multi_modal_data")
        turn = _Turn(prompt, completion, new_messages, previous)
        try:
            tail = self._tail(skeleton(new_messages, self._proved(turn, history)), new_messages)
            layout = self._joined(tail, turn)
        except SpecialTokenError as error:
            error.where = _in_extension(error.where)
            raise
        except TemplateError as error:
            raise NotBridged(f"the template does not take this extension: {error}") from error
        return self._assembled(layout, turn, resolve)

    def _proved(self, turn: _Turn, history: History) -> MediaCount:
        """What the skeleton has to hold, once it is proved that nothing else matters."""
        messages = turn.messages
        key = (shape_of(messages, self._reads.marks), history)
        media = MediaCount()
        proof = self._proof(key, lambda: self._prove(messages, history))
        if proof.counts_media:
            hashes = turn.previous.mm_hashes
            media = MediaCount(len(hashes.get("image", ())), len(hashes.get("video", ())))
            self._check_media_known(media, turn.prompt)
            # Not every count can be tried; what is tried is where that many media stand.
            counted = (*key, min(media.images, 2), min(media.videos, 2))
            proof = self._proof(counted, lambda: self._prove(messages, history, media))
        if proof.failure is not None:
            raise NotBridged(proof.failure)
        return media

    def _proof(self, key: Any, prove: Callable[[], Proof]) -> Proof:
        proof = self._proofs.get(key)
        if proof is None:
            proof = self._kept(repr(("bridge", self._setting, key)), prove)
            with self._lock:
                if len(self._proofs) >= _MAX_PROOFS:
                    self._proofs.clear()
                self._proofs[key] = proof
        return proof

    def _kept(self, about: str, prove: Callable[[], Proof]) -> Proof:
        """The proof as another process left it, or a new one."""
        proof = self._shelf.get(about, Proof) if self._shelf is not None else None
        if proof is None:
            proof = prove()
            if self._shelf is not None:
                self._shelf.put(about, proof)
        return proof

    def _prove(self, messages: Sequence[Message], history: History, media: MediaCount | None = None) -> Proof:
        if media is None and self._prover.counts_media(messages):
            return Proof(None, counts_media=True)
        failure = self._prover.independence_failure(messages, media)
        if failure is None and history == "template":
            failure = self._prover.rewriting_failure(messages, media)
        return Proof(failure)

    def _check_media_known(self, media: MediaCount, prompt: Sequence[int]) -> None:
        if not any(media) and not self._writer.media_ids.isdisjoint(prompt):
            raise NotBridged(
                "the template counts media, and previous_multi_modal_data lacks those of the prompt"
            )

    def _tail(self, history: ProbedHistory, extension: Sequence[Message]) -> Tail:
        messages = history.messages
        text = self._text(history, [*messages, *extension], True)
        tail = self._tails.find(text, len(messages) - 1)
        if tail.close is None and messages[-1].tool_calls and self._profile.prints_tool_calls:
            raise NotBridged("the template writes no stop token after a tool call")
        return tail

    def _independent_part(self, history: ProbedHistory, extension: Sequence[Message]) -> str:
        """What must not vary: the tail from its stop token on, or all of it where there is none."""
        tail = self._tail(history, extension)
        return plain(tail.text)[tail.close.start if tail.close is not None else 0 :]

    def _text(self, history: ProbedHistory, messages: Sequence[Message], prompt: bool) -> TracedStr:
        text = self._template.render(
            messages,
            tools=history.tools,
            documents=history.documents,
            add_generation_prompt=prompt,
            form=self._profile.form,
            arguments=self._arguments,
        )
        return disown_prompt(text, self._profile.generation_prompts) if prompt else text

    def _joined(self, tail: Tail, turn: _Turn) -> Layout:
        """What is to be written after the completion."""
        close = tail.close
        if turn.completion and turn.completion[-1] in self._stop_ids:
            if close is None:
                return tail.layout
            # Where the close is the next turn's opener, only that opener can stand for it.
            keep = close.is_opener and turn.completion[-1] != close.token_id
            return rest_of(tail.layout, close.start if keep else close.stop)
        head, start = self._joint.closing(tail, turn.messages, turn.prompt, turn.completion)
        rest = rest_of(tail.layout, start)
        return self._writer.lay_out(TracedStr(head) + rest.text) if head else rest

    def _assembled(self, layout: Layout, turn: _Turn, resolve: Resolve) -> RenderedTokens:
        places = media_places(turn.messages, where="new_messages")
        written = [replace(found, message=_new(found.message)) for found in layout.placeholders]
        check_placement(places, written, self._profile.image_roles, where="new_messages")
        items = resolve(places, len(turn.previous.mm_hashes.get("image", ())))
        encoded = self._writer.write(layout, items, begins=False)
        base = len(turn.prompt) + len(turn.completion)
        entries = [
            (found.shifted(base), item)
            for found, item in zip(encoded.ranges, items, strict=True)
            if item is not None
        ]
        previous = turn.previous
        return RenderedTokens(
            token_ids=[*turn.prompt, *turn.completion, *encoded.ids],
            spans=_spans(len(turn.prompt), base, encoded.spans),
            roles=tuple([message.role for message in turn.messages]),
            tool_names=tuple([message.name if message.role == "tool" else None for message in turn.messages]),
            multi_modal_data=previous.merged(MultiModalData.of(entries)) if entries else previous,
            text=plain(layout.text),
            _decode=self._writer.tokenizer.decode,
        )


def _check_extension(messages: Sequence[Message], depends_on_company: bool) -> None:
    if not messages:
        raise NotBridged("the extension is empty")
    if any(message.role == "assistant" for message in messages):
        raise NotBridged("the extension holds an assistant message, whose tokens were not sampled")
    if depends_on_company and media_places(messages):
        raise NotBridged("the processor treats an image differently when more of them follow")


def _in_extension(where: str | None) -> str | None:
    """Path of a new message, from its path in the skeleton."""
    found = re.match(r"messages\[(\d+)\]", where or "")
    if where is None or found is None:
        return where
    return f"new_messages[{int(found.group(1)) - _FIRST_NEW}]{where[found.end() :]}"


def _new(message: int) -> int:
    """Index among the new messages, -1 for what belongs to none of them."""
    return message - _FIRST_NEW if message >= _FIRST_NEW else -1


def _spans(prompt: int, base: int, tail: Sequence[TokenSpan]) -> tuple[TokenSpan, ...]:
    """Spans over previous prompt, completion (which ends at `base`) and tail."""
    spans = [TokenSpan(0, prompt, -1, "prompt", False)] if prompt else []
    if base > prompt:
        spans.append(TokenSpan(prompt, base, -1, "completion", True))
    spans += [
        TokenSpan(start + base, stop + base, _new(message), kind, False)
        for start, stop, message, kind, _ in tail
    ]
    return tuple(spans)


def _as_list(ids: TokenIds, where: str) -> Sequence[int]:
    """Token ids as Python integers; a list is taken as it is."""
    if not isinstance(ids, np.ndarray):
        return ids
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InputError(
            "not token ids",
            where=where,
            expected="a list of integers, or an integer array of shape (n,)",
            got=f"{ids.dtype} of shape {ids.shape}",
        )
    listed: list[int] = ids.tolist()
    return listed
