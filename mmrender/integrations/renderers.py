"""mmrender behind the interface of the `renderers` package, which verifiers and prime-rl render with.

```python
from renderers import CustomRendererConfig, create_renderer
from renderers.base import load_tokenizer

config = CustomRendererConfig(import_path="mmrender.integrations.renderers.MMRenderer")
renderer = create_renderer(load_tokenizer("MODEL"), config)
```

Fields, methods and statuses are theirs, so their `build_training_sample` and other helpers work on it. What
differs from their own renderers is what is rendered: the model's chat template itself, whichever it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, Literal

import renderers
from msgspec import structs
from pydantic import ConfigDict
from renderers.base import should_rerender_for_thinking_retention

from mmrender.content import normalize_messages
from mmrender.errors import RenderError
from mmrender.media.pixels import ImageBackend
from mmrender.messages import UNKNOWN_SOURCE, MediaPart, Message, MessageLike
from mmrender.parsing.calls import CallStatus
from mmrender.renderer import Renderer
from mmrender.sidecar import (
    TOKEN_TYPES,
    Expansion,
    Framework,
    MultiModalData,
    PlaceholderRange,
    Repeat,
    TensorDtype,
)
from mmrender.tokens.rendered import RenderedTokens

_STATUSES: Final[dict[CallStatus, renderers.ToolCallParseStatus]] = {
    "ok": renderers.ToolCallParseStatus.OK,
    "invalid_json": renderers.ToolCallParseStatus.INVALID_JSON,
    "unclosed": renderers.ToolCallParseStatus.UNCLOSED_BLOCK,
    "missing_name": renderers.ToolCallParseStatus.MISSING_NAME,
    "malformed": renderers.ToolCallParseStatus.MALFORMED_STRUCTURE,
    "unknown_tool": renderers.ToolCallParseStatus.UNKNOWN_TOOL,
}


class MMRendererConfig(renderers.BaseRendererConfig):
    """Options of `MMRenderer`; all others are variables of the chat template, such as `enable_thinking`."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: Literal["mmrender"] = "mmrender"
    model: str | None = None
    """Model directory or hub id; by default the tokenizer's `name_or_path`."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    trust_remote_code: bool = False
    """Whether to run image processor code that the model brings along."""
    image_backend: ImageBackend = "torch"
    """How images are resampled; see `Renderer.from_pretrained`."""

    _internal_fields = frozenset({"model", "revision", "trust_remote_code", "image_backend"})
    _allow_opaque_template_kwargs = True


class MMRenderer:
    """A renderer as the `renderers` package has it. Safe to use from many threads: one serves as a pool.

    Args:
        tokenizer: Only its `name_or_path` is read; the tokens are those of the model's own files.
        config: What to load, and the template's variables.

    Raises:
        ModelNotFoundError: There is no such directory or repository; see `Renderer.from_pretrained`.
    """

    config_class = MMRendererConfig
    supports_tools = True
    supports_process_multimodal = True

    def __init__(self, tokenizer: Any, config: MMRendererConfig) -> None:
        self.config = config
        self.renderer = _loaded(
            config.model or tokenizer.name_or_path,
            config.revision,
            config.trust_remote_code,
            config.image_backend,
        )
        self._variables = dict(config.model_extra or {})

    @property
    def is_multimodal(self) -> bool:
        """Whether the model takes images."""
        return self.renderer.media is not None

    @property
    def is_prefix_stable(self) -> bool:
        """False: no probe of a template proves that no message whatever changes an earlier one."""
        return False

    @property
    def mm_token_type_id_map(self) -> dict[int, int]:
        """Token type by the id of the token that stands for an item: 1 for images, 2 for videos."""
        ids = self._placeholder_ids()
        return {ids[modality]: TOKEN_TYPES[modality] for modality in ids}

    def render(
        self,
        messages: Sequence[MessageLike],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        process_multimodal: bool = True,
    ) -> renderers.RenderedTokens:
        """Render a conversation.

        Args:
            messages: The conversation.
            tools: Tool definitions.
            add_generation_prompt: Whether to open the assistant's turn.
            process_multimodal: Whether to load and process images. Without it each stays the one token that
                the template writes, for engines that widen it themselves, and there is no sidecar.

        Raises:
            RenderError: The conversation has assistant turns, and none of their tokens counts as sampled.
            MMRenderError: As for `Renderer.render`.
        """
        rendered = self._render(messages, tools, add_generation_prompt, process_multimodal)
        turns = [index for index, role in enumerate(rendered.roles) if role == "assistant"]
        if turns and not add_generation_prompt and not rendered.sampled_mask.any():
            raise RenderError(
                "no turn of this conversation is one that the model writes, so nothing could be trained on",
                where=f"messages[{turns[0]}]",
                expected="a turn that begins with its generation prompt, or has an answer and no reasoning",
                got=f"messages {', '.join(map(str, turns))}, which the template writes differently",
                remedy="Set the template's variables in the config, or train on each turn by itself",
            )
        return _translated(rendered)

    def render_ids(
        self,
        messages: Sequence[MessageLike],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        process_multimodal: bool = True,
    ) -> list[int]:
        """Render a conversation to token ids alone; see `render`."""
        return self._render(messages, tools, add_generation_prompt, process_multimodal).token_ids

    def _render(
        self,
        messages: Sequence[MessageLike],
        tools: Sequence[Any] | None,
        add_generation_prompt: bool,
        process_multimodal: bool,
    ) -> RenderedTokens:
        return self.renderer.render(
            messages if process_multimodal else _unloaded(messages),
            tools=tools or None,
            add_generation_prompt=add_generation_prompt,
            chat_template_kwargs=self._variables,
        )

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Sequence[int],
        previous_completion_ids: Sequence[int],
        new_messages: Sequence[MessageLike],
        *,
        tools: Sequence[Any] | None = None,
        previous_multi_modal_data: renderers.MultiModalData | None = None,
        process_multimodal: bool = True,
    ) -> renderers.RenderedTokens | None:
        """Append new messages to what was sampled, or give None where that cannot be proved right.

        `renderer.why_not_bridged` then says why. The config's `thinking_retention` decides where the template
        would write earlier turns differently now: `"all"` keeps them as sampled; `"tool_cycle"` does so until
        a user's message; without it None asks for a full rendering.
        """
        retention = self.config.thinking_retention
        if retention is not None and should_rerender_for_thinking_retention(retention, list(new_messages)):
            return None
        earlier = previous_multi_modal_data if process_multimodal else None
        bridged = self.renderer.bridge_to_next_turn(
            previous_prompt_ids,
            previous_completion_ids,
            new_messages if process_multimodal or not new_messages else _unloaded(new_messages),
            tools=tools or None,
            previous_multi_modal_data=None if earlier is None else _sidecar(earlier),
            history="template" if retention is None else "sampled",
            chat_template_kwargs=self._variables,
        )
        if bridged is None:
            return None
        # Theirs says nothing of earlier tokens: neither what was sampled nor what is content.
        unsampled = tuple([span._replace(sampled=False) for span in bridged.spans])
        return _translated(replace(bridged, spans=unsampled))

    def parse_response(
        self,
        token_ids: Sequence[int],
        *,
        tools: Sequence[Any] | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> renderers.ParsedResponse:
        """Read a completion; any can be read."""
        parsed = self.renderer.parse_response(
            token_ids,
            tools=tools or None,
            prompt_ids=prompt_ids or None,
            chat_template_kwargs=self._variables,
        )
        return renderers.ParsedResponse(
            content=parsed.content,
            reasoning_content=parsed.reasoning_content,
            reasoning_complete=parsed.reasoning_closed,
            tool_calls=[
                renderers.ParsedToolCall(
                    raw=call.raw,
                    name=call.name,
                    arguments=call.arguments,
                    token_span=call.span,
                    status=_STATUSES[call.status],
                    id=call.id,
                )
                for call in parsed.tool_calls
            ],
        )

    def get_stop_token_ids(self) -> list[int]:
        """Tokens that end the assistant's turn, the one that this template ends it with first."""
        profile = self.renderer.template_profile(chat_template_kwargs=self._variables)
        own = {*profile.end_ids, *profile.openers.values()} & profile.stop_ids
        return [*sorted(own), *sorted(profile.stop_ids - own)]

    def _placeholder_ids(self) -> dict[str, int]:
        media = self.renderer.media
        written = media.processor.placeholder if media is not None else {}
        ids = {modality: self.renderer.tokenizer.token_id(text) for modality, text in written.items()}
        return {modality: token_id for modality, token_id in ids.items() if token_id is not None}


@lru_cache(8)
def _loaded(
    model: str, revision: str | None, trust_remote_code: bool, image_backend: ImageBackend
) -> Renderer:
    """Load a model's renderer once, whatever the template's variables: those are given with each call."""
    return Renderer.from_pretrained(
        model, revision=revision, trust_remote_code=trust_remote_code, image_backend=image_backend
    )


def _unloaded(messages: Sequence[MessageLike]) -> list[Message]:
    """Return the conversation with media parts that nothing is loaded for."""

    def unloaded(message: Message) -> Message:
        if not isinstance(message.content, tuple):
            return message
        parts = [
            structs.replace(part, source=UNKNOWN_SOURCE) if isinstance(part, MediaPart) else part
            for part in message.content
        ]
        return structs.replace(message, content=tuple(parts))

    return [unloaded(message) for message in normalize_messages(messages)]


@dataclass(frozen=True)
class _GivenItem:
    """An item of a sidecar of theirs: its tensors, and the tokens that it takes."""

    modality: Literal["image", "video"]
    identity: str
    expansion: Expansion
    given: dict[str, Any]
    size: tuple[int, int] = (0, 0)
    grid: tuple[int, ...] = ()
    nbytes: int = 0

    def tensors(self, dtype: TensorDtype = "float32", *, framework: Framework = "numpy") -> dict[str, Any]:
        """Give the tensors as they came, whatever is asked for."""
        return self.given


def _sidecar(given: renderers.MultiModalData) -> MultiModalData:
    """Return a sidecar of theirs as one of ours, around the same tensors."""
    ranges = {
        modality: [PlaceholderRange(found.offset, found.length) for found in found_ranges]
        for modality, found_ranges in given.mm_placeholders.items()
    }
    items = {
        modality: [
            _GivenItem(modality, digest, (Repeat(modality, found.length),), tensors)
            for digest, found, tensors in zip(
                given.mm_hashes[modality], ranges[modality], found_items, strict=True
            )
        ]
        for modality, found_items in given.mm_items.items()
    }
    return MultiModalData(given.mm_hashes, ranges, items)


def _translated(rendered: RenderedTokens) -> renderers.RenderedTokens:
    """Return a rendering of ours as theirs: lists by token, tensors of torch."""
    ours = rendered.multi_modal_data
    theirs = renderers.MultiModalData(
        mm_hashes={modality: list(hashes) for modality, hashes in ours.mm_hashes.items()},
        mm_placeholders={
            modality: [renderers.PlaceholderRange(found.offset, found.length) for found in ranges]
            for modality, ranges in ours.mm_placeholders.items()
        },
        mm_items={
            modality: [item.tensors(framework="torch") for item in items]
            for modality, items in ours.mm_items.items()
        },
    )
    return renderers.RenderedTokens(
        token_ids=rendered.token_ids,
        message_indices=rendered.message_indices.tolist(),
        sampled_mask=rendered.sampled_mask.tolist(),
        is_content=rendered.is_content.tolist(),
        message_roles=list(rendered.roles),
        message_tool_names=list(rendered.tool_names),
        multi_modal_data=theirs if ours else None,
    )
