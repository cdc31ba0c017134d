"""`RenderedTokens`: token ids with the message and kind of each token.

Attribution is a few dozen spans over the token list. Per-token arrays are built on request.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from mmrender.errors import InputError
from mmrender.media.encoded import encoded_image
from mmrender.messages import MODALITIES, Modality, Role
from mmrender.notebook import Drawn
from mmrender.sidecar import MultiModalData, collapse
from mmrender.template.text import Kind

TokenKind: TypeAlias = Kind | Modality | Literal["template", "prompt", "completion"]
"""`Kind` of the text that a token was made from, `template` without a message, a media placeholder, or the
unchanged `prompt` and `completion` of a bridge."""

CONTENT_KINDS: frozenset[str] = frozenset(
    {"content", "reasoning", "tool_call", "name", "extra", "tools", "documents", *MODALITIES}
)

ASSISTANT: tuple[Role, ...] = ("assistant",)
"""The roles that are trained on by default."""


class TokenSpan(NamedTuple):
    """Tokens `[start, stop)` of one message (-1: none) and one kind.

    A token that joins two pieces of text belongs to the piece of its first character. `sampled` tokens are
    written by the model: they follow a generation prompt and run through the stop token.
    """

    start: int
    stop: int
    message: int
    kind: TokenKind
    sampled: bool


@dataclass(frozen=True)
class RenderedTokens(Drawn):
    """A rendered conversation.

    Attributes:
        token_ids: The prompt, placeholders widened.
        spans: Attribution, rising without gaps from 0 to `len(token_ids)`.
        roles: Role of each message.
        tool_names: Name of the tool for each tool message if it is known, and None for other messages.
        multi_modal_data: Items, hashes and placeholder ranges, in prompt order.
        text: The template's text, each placeholder once.
        rewritten: Assistant messages that do not begin with their generation prompt, because the template
            writes them differently as history than it asked for them. Their tokens do not count as sampled.
        answer_only: Assistant messages without reasoning whose generation prompt writes a reasoning block,
            unlike the turn. Only their answer counts as sampled, from its first token on.
        placeholder_ids: The template's token for an item, by modality.
    """

    token_ids: list[int]
    spans: tuple[TokenSpan, ...]
    roles: tuple[Role, ...] = ()
    tool_names: tuple[str | None, ...] = ()
    multi_modal_data: MultiModalData = field(default_factory=MultiModalData)
    text: str = ""
    rewritten: tuple[int, ...] = ()
    answer_only: tuple[int, ...] = ()
    placeholder_ids: Mapping[str, int] = field(default_factory=dict, compare=False)
    _decode: Callable[[Sequence[int]], str] | None = field(default=None, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_decode": None}

    @property
    def token_array(self) -> npt.NDArray[np.int32]:
        """`token_ids` as int32 of shape `(n,)`."""
        return np.array(self.token_ids, np.int32)

    @property
    def collapsed_ids(self) -> list[int]:
        """`token_ids` with each placeholder as the single token that the template wrote.

        Engines that widen placeholders themselves take these ids. They would widen `token_ids` once more.

        Raises:
            PlaceholderError: The token cannot be put back. See `mmrender.sidecar.collapse`.
        """
        return collapse(self.token_ids, self.multi_modal_data, self.placeholder_ids)

    def to_vllm_prompt(self) -> dict[str, Any]:
        """Return the prompt for vLLM's `LLM.generate`, whose own processor widens it again to `token_ids`.

        Images go as pixels that vLLM processes to the same tensors, under their identity, so that vLLM does
        not process a known image again.

        Raises:
            PlaceholderError: As for `collapsed_ids`.
            MediaError: An item cannot be turned into an image. See `mmrender.media.encoded.encoded_image`.
        """
        prompt: dict[str, Any] = {"prompt_token_ids": self.collapsed_ids}
        if self.multi_modal_data:
            data = self.multi_modal_data
            prompt["multi_modal_data"] = {
                modality: [encoded_image(item).image for item in items]
                for modality, items in data.mm_items.items()
            }
            prompt["multi_modal_uuids"] = {name: list(hashes) for name, hashes in data.mm_hashes.items()}
        return prompt

    def _filled(self, values: Sequence[Any], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        lengths = [span.stop - span.start for span in self.spans]
        return np.repeat(np.array(values, dtype), lengths)

    @property
    def message_indices(self) -> npt.NDArray[np.int32]:
        """Index of the message that each token belongs to, or -1, as int32 of shape `(n,)`.

        A sampled stop token belongs to the message that it ends, also if it opens the next turn.
        """
        return self._filled([span.message for span in self.spans], np.int32)

    @property
    def sampled_mask(self) -> npt.NDArray[np.bool_]:
        """Mask of the tokens that the model writes, as bool of shape `(n,)`."""
        return self._filled([span.sampled for span in self.spans], np.bool_)

    @property
    def is_content(self) -> npt.NDArray[np.bool_]:
        """Mask of the tokens that a caller or the model wrote, without scaffold, as bool of shape `(n,)`."""
        return self._filled([span.sampled or span.kind in CONTENT_KINDS for span in self.spans], np.bool_)

    def loss_mask(self, roles: Collection[Role] = ASSISTANT) -> npt.NDArray[np.bool_]:
        """Mask of the tokens to train on, as bool of shape `(n,)`.

        For `assistant` these are its sampled tokens, and for other roles the content of their messages.
        """
        trained = []
        for span in self.spans:
            role = self.roles[span.message] if span.message >= 0 else None
            is_text = span.kind in CONTENT_KINDS and span.kind not in MODALITIES
            trained.append(role in roles and (span.sampled if role == "assistant" else is_text))
        return self._filled(trained, np.bool_)

    @property
    def tokens_per_message(self) -> list[int]:
        """Number of tokens of each message."""
        counts = [0] * len(self.roles)
        for span in self.spans:
            if span.message >= 0:
                counts[span.message] += span.stop - span.start
        return counts

    def slices(self, message: int) -> Iterator[slice]:
        """Yield the runs of tokens of one message, as slices of `token_ids`."""
        for is_own, run in groupby(self.spans, lambda span: span.message == message):
            if is_own:
                spans = [*run]
                yield slice(spans[0].start, spans[-1].stop)

    def decode(self, start: int = 0, stop: int | None = None) -> str:
        """Text of the tokens `[start, stop)`, special tokens and placeholders included.

        Raises:
            InputError: The object was unpickled, so it has no tokenizer.
        """
        if self._decode is None:
            raise InputError(
                "a rendering that was unpickled carries no tokenizer",
                where="rendered.decode",
                remedy="Call renderer.decode(rendered.token_ids)",
            )
        return self._decode(self.token_ids[start:stop])
