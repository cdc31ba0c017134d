"""mmrender as verl's `ContinuousTokenBuilder`, for every family, so that verl's agent loops render with it.

verl chooses a builder by `model_type`. Importing this module replaces all of its builders in this process.
`VERL_USE_EXTERNAL_MODULES=mmrender.integrations.verl_tokens` imports it in each process of verl's.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from verl.utils.tokenizer import continuous_token_wiring as wiring
from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder, MergeResult

from mmrender.client.engine import ModelTokens
from mmrender.errors import InputError, RenderError
from mmrender.integrations.verl_model import check_processor_settings, renderer_of
from mmrender.sidecar import MultiModalData
from mmrender.training.families import ModelFamily
from mmrender.training.kwargs import collate_mm_kwargs
from mmrender.training.tensor_list import torch
from mmrender.trajectory.sample import TrainingSample


class TokenBuilder(ContinuousTokenBuilder):
    """Renders the first prompt of a rollout of text, and bridges its turns.

    One builder serves one rollout, as verl makes them: it keeps the last prompt and its images. Sampled
    tokens are never moved. An extension that cannot be proved right is refused.

    Args:
        tokenizer: verl's, whose `name_or_path` has the model's files.
        options: Options of verl's builders.
    """

    def __init__(self, tokenizer: Any, **options: Any) -> None:
        super().__init__(tokenizer, **options)
        self.renderer = renderer_of(tokenizer, getattr(self, "processor", None))
        self._prompt: list[int] = []
        self._media = MultiModalData()
        self._sampled = 0

    def build_initial_tokens(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        images: list[Any] | None = None,
        videos: list[Any] | None = None,
        audios: list[Any] | None = None,
        mm_inputs_out: dict[str, Any] | None = None,
    ) -> list[int]:
        """Render the first prompt.

        Args:
            messages: The conversation.
            tools: Tool definitions.
            images: In place of the sources of the messages' images, if verl has loaded them.
            videos: The same, each with its metadata.
            audios: None.
            mm_inputs_out: Receives the tensors of images and videos.

        Raises:
            InputError: There is audio, or a number of images or videos is not the messages'.
            MMRenderError: As for `Renderer.render`.
        """
        if audios:
            raise InputError("audio is not supported", where="audios", got=f"{len(audios)} clips")
        rendered = self.renderer.render(
            _with_media(messages, images, videos),
            tools=tools or None,
            add_generation_prompt=True,
            chat_template_kwargs=self.chat_template_kwargs,
        )
        self._prompt, self._media, self._sampled = list(rendered.token_ids), rendered.multi_modal_data, 0
        if mm_inputs_out is not None and self._media:
            unmasked = np.zeros(len(rendered), np.bool_)
            sample = TrainingSample(rendered.token_array, unmasked, multi_modal_data=self._media)
            family = ModelFamily.from_config(str(self.tokenizer.name_or_path))
            mm_inputs_out.update(collate_mm_kwargs([sample], family, dtype=torch.float32))
        return list(self._prompt)

    def merge_assistant_tokens(
        self, runtime_token_ids: list[int], assistant_token_ids: list[int]
    ) -> MergeResult:
        """Append sampled tokens."""
        self._take_prompt(runtime_token_ids)
        self._sampled = len(assistant_token_ids)
        return super().merge_assistant_tokens(runtime_token_ids, assistant_token_ids)

    def merge_context_tokens(
        self,
        previous_messages: list[dict[str, Any]],
        updated_messages: list[dict[str, Any]],
        runtime_token_ids: list[int],
        *,
        tools: list[dict[str, Any]] | None = None,
    ) -> MergeResult:
        """Append the tokens of new messages, with their images, and of the generation prompt.

        Raises:
            RenderError: The tokens are not of this builder's rollout, or appending cannot be proved right.
            MMRenderError: As for `Renderer.bridge_to_next_turn`.
        """
        self._assert_append_only(previous_messages, updated_messages)
        start = len(runtime_token_ids) - self._sampled
        self._take_prompt(runtime_token_ids[:start])
        *asked, turn = (message["role"] for message in previous_messages)
        bridged = self.renderer.bridge_to_next_turn(
            self._prompt,
            runtime_token_ids[start:],
            updated_messages[len(previous_messages) :],
            tools=tools or None,
            previous_multi_modal_data=self._media,
            previous_roles=asked if turn == "assistant" else [*asked, turn],
            chat_template_kwargs=self.chat_template_kwargs,
        )
        if bridged is None:
            raise RenderError(
                "these messages cannot be appended",
                where=f"messages[{len(previous_messages)}]",
                expected="an extension whose tokens do not depend on earlier turns",
                got=self.renderer.why_not_bridged,
            )
        self._prompt, self._media, self._sampled = list(bridged.token_ids), bridged.multi_modal_data, 0
        return MergeResult(list(self._prompt), len(bridged) - len(runtime_token_ids), kind="context")

    def _take_prompt(self, ids: list[int]) -> None:
        """Take a prompt of text that verl has cut, or that another builder made."""
        if self._prompt == ids:
            return
        if self._media or ModelTokens(self.renderer).media_ids.intersection(ids):
            raise RenderError(
                "this builder did not make the prompt, so its images are not known",
                where="runtime_token_ids",
                expected=f"{len(self._prompt)} tokens",
                got=f"{len(ids)}",
                remedy="Use one builder for each rollout, from its first prompt on",
            )
        self._prompt = list(ids)


class MultimodalTokenBuilder(TokenBuilder):
    """Renders and bridges with images and videos.

    Args:
        tokenizer: As for `TokenBuilder`.
        processor: verl's, whose chat template counts.
        mm_processor_kwargs: `data.mm_processor_kwargs` of verl's configuration. Those that change images are
            refused.
        options: Others of verl's builders.

    Raises:
        InputError: A setting would change images.
    """

    def __init__(
        self,
        tokenizer: Any,
        processor: Any,
        *,
        mm_processor_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        check_processor_settings(mm_processor_kwargs)
        self.processor = processor
        self.mm_processor_kwargs = mm_processor_kwargs or {}
        super().__init__(tokenizer, **options)

    @classmethod
    def supports_multimodal(cls) -> bool:
        """Whether images may be rendered: yes."""
        return True


def _with_media(
    messages: Sequence[Mapping[str, Any]], images: Sequence[Any] | None, videos: Sequence[Any] | None
) -> list[dict[str, Any]]:
    """Return messages with verl's images and videos as the sources of their parts.

    verl has loaded and resized them by the part's settings, which therefore are left out.
    """
    sources = {
        "image": None if images is None else iter(images),
        "video": None if videos is None else map(_video, videos),
    }
    filled = []
    for message in messages:
        content = message.get("content")
        parts = [_filled(part, sources) for part in content] if isinstance(content, list) else content
        filled.append({**message, "content": parts})
    for name, rest in sources.items():
        if rest is not None and next(rest, None) is not None:
            raise InputError(f"there are more {name}s than the messages show", where=f"{name}s")
    return filled


def _filled(part: Any, sources: Mapping[str, Iterator[Any] | None]) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    modality = {"image": "image", "image_url": "image", "video": "video", "video_url": "video"}.get(
        kind or ""
    )
    rest = sources[modality] if modality else None
    if modality is None or rest is None:
        return part
    source = next(rest, None)
    if source is None:
        raise InputError(f"the messages show more {modality}s than were loaded", where=f"{modality}s")
    return {"type": modality, modality: source} if modality == "image" else {"type": modality, **source}


def _video(video: Any) -> dict[str, Any]:
    """Return the members of a part for a video as verl loads it: frames, and perhaps metadata."""
    frames, metadata = video if isinstance(video, tuple) else (video, {})
    levels = torch.as_tensor(frames)
    rounded = levels.round().clamp(0, 255).to(torch.uint8)
    if levels.ndim != 4 or levels.shape[1] != 3 or not torch.equal(rounded.to(levels.dtype), levels):
        raise InputError(
            "a video has another form",
            where="videos",
            expected="levels from 0 to 255 of shape (frames, 3, height, width)",
            got=f"{levels.dtype} {list(levels.shape)}",
        )
    names = ("fps", "frames_indices", "total_num_frames")
    known = {name: metadata[name] for name in names if metadata.get(name) is not None}
    if "frames_indices" in known:
        known["frames_indices"] = tuple(map(int, known["frames_indices"]))
    return {"video": rounded.permute(0, 2, 3, 1).contiguous().numpy(), **known}


for _family, _builder in dict(wiring._CONTINUOUS_TOKEN_BUILDER_REGISTRY).items():
    wiring._CONTINUOUS_TOKEN_BUILDER_REGISTRY[_family] = (
        MultimodalTokenBuilder if _builder.supports_multimodal() else TokenBuilder
    )
