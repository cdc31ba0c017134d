"""mmrender behind the interface of the `renderers` package, which verifiers and prime-rl render with.

```python
from renderers import CustomRendererConfig, create_renderer
from renderers.base import load_tokenizer

config = CustomRendererConfig(import_path="mmrender.integrations.renderers.MMRenderer")
renderer = create_renderer(load_tokenizer("MODEL"), config)
```

Fields, methods and statuses are theirs, so their `build_training_sample` and other helpers work on it. In
contrast to their own renderers, it runs the chat template of any model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, Literal

import renderers
from msgspec import structs
from pydantic import ConfigDict
from renderers.base import should_rerender_for_thinking_retention

from mmrender.client.engine import ModelTokens
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
    """Options of `MMRenderer`, and variables of the chat template such as `enable_thinking`."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: Literal["mmrender"] = "mmrender"
    model: str | None = None
    """Model directory or hub id, by default the tokenizer's `name_or_path`."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    trust_remote_code: bool = False
    """Whether to run image processor code of the model."""
    image_backend: ImageBackend = "torch"
    """How images are resampled. See `Renderer.from_pretrained`."""

    _internal_fields = frozenset({"model", "revision", "trust_remote_code", "image_backend"})
    _allow_opaque_template_kwargs = True


class MMRenderer:
    """A renderer with the interface of the `renderers` package. Many threads may share one, as a pool.

    Args:
        tokenizer: Only its `name_or_path` is read. Tokens come from the model's own files.
        config: The model, and the template's variables.

    Raises:
        ModelNotFoundError: The directory or repository does not exist. See `Renderer.from_pretrained`.
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
        """Always False: prefix stability cannot be proved by probing."""
        return False

    @property
    def mm_token_type_id_map(self) -> dict[int, int]:
        """Token type by the id of a placeholder token: 1 for images, 2 for videos."""
        ids = ModelTokens(self.renderer).placeholder_ids
        return {token: TOKEN_TYPES[modality] for modality, token in ids.items()}

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
            process_multimodal: Whether to load and process images. Otherwise each stays one token, for
                engines that widen it themselves, and the result has no sidecar.

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
        """Render a conversation to token ids alone. See `render`."""
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
        """Append new messages to the sampled tokens, or return None if that cannot be proved right.

        `renderer.why_not_bridged` then says why. If the template would
        write earlier turns differently now, the config's `thinking_retention` decides: `"all"` keeps them as
        sampled, `"tool_cycle"` keeps them until a user's message, and without it the result is None.
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
        # Their bridges mark no earlier token as sampled or as content.
        unsampled = tuple([span._replace(sampled=False) for span in bridged.spans])
        return _translated(replace(bridged, spans=unsampled))

    def parse_response(
        self,
        token_ids: Sequence[int],
        *,
        tools: Sequence[Any] | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> renderers.ParsedResponse:
        """Parse any completion."""
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
        """Return the tokens that end the assistant's turn, first the template's own."""
        profile = self.renderer.template_profile(chat_template_kwargs=self._variables)
        ends = {*profile.end_ids, *profile.openers.values()} & profile.stop_ids
        return [*sorted(ends), *sorted(profile.stop_ids - ends)]


@lru_cache(8)
def _loaded(
    model: str, revision: str | None, trust_remote_code: bool, image_backend: ImageBackend
) -> Renderer:
    """Load a model's renderer once. Variables of the template are passed with each call."""
    return Renderer.from_pretrained(
        model, revision=revision, trust_remote_code=trust_remote_code, image_backend=image_backend
    )


def _unloaded(messages: Sequence[MessageLike]) -> list[Message]:
    """Return the conversation with media parts that are not loaded."""

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
class _TheirItem:
    """An item of their sidecar: its tensors and its number of tokens."""

    modality: Literal["image", "video"]
    identity: str
    expansion: Expansion
    values: dict[str, Any]
    size: tuple[int, int] = (0, 0)
    grid: tuple[int, ...] = ()
    nbytes: int = 0

    def tensors(self, dtype: TensorDtype = "float32", *, framework: Framework = "numpy") -> dict[str, Any]:
        """Return the tensors unchanged."""
        return self.values


def _sidecar(theirs: renderers.MultiModalData) -> MultiModalData:
    """Return their sidecar as ours, around the same tensors."""
    ranges = {
        modality: [PlaceholderRange(each.offset, each.length) for each in places]
        for modality, places in theirs.mm_placeholders.items()
    }
    items = {
        modality: [
            _TheirItem(modality, digest, (Repeat(modality, place.length),), tensors)
            for digest, place, tensors in zip(
                theirs.mm_hashes[modality], ranges[modality], values, strict=True
            )
        ]
        for modality, values in theirs.mm_items.items()
    }
    return MultiModalData(theirs.mm_hashes, ranges, items)


def _translated(rendered: RenderedTokens) -> renderers.RenderedTokens:
    """Return our rendering as theirs: a list entry per token, and torch tensors."""
    ours = rendered.multi_modal_data
    theirs = renderers.MultiModalData(
        mm_hashes={modality: list(hashes) for modality, hashes in ours.mm_hashes.items()},
        mm_placeholders={
            modality: [renderers.PlaceholderRange(each.offset, each.length) for each in ranges]
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
