"""Media of a prompt as the arguments of a Transformers model in this process."""

import inspect
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from mmrender.errors import EngineUnsupportedError
from mmrender.messages import MODALITIES
from mmrender.sidecar import MultiModalData, mm_token_type_ids

_PAD_SETTINGS: Final = tuple(f"{one}_token_{key}" for one in MODALITIES for key in ("id", "index"))


def media_arguments(model: Any, data: MultiModalData, length: int) -> dict[str, Any]:
    """Return the model's keyword arguments for the items of a prompt, joined in prompt order."""
    import torch

    if not data:
        return {}
    spans = data.spans(length)
    num_tracks = data.num_tracks
    if num_tracks and num_tracks < data.count("video"):
        raise EngineUnsupportedError(
            f"{type(model).__name__} numbers either all videos of a prompt with sound tracks, or none",
            where="multi_modal_data",
            expected=f"{data.count('video')} sound tracks",
            got=str(num_tracks),
            remedy="Leave the silent videos out, or open the renderer without use_audio_in_video",
        )
    dtype: Any = str(model.dtype).removeprefix("torch.")
    joined: dict[str, list[Any]] = {}
    for span in spans:
        for name, tensor in span.item.tensors(dtype, framework="torch").items():
            joined.setdefault(name, []).append(tensor)
            if span.modality == "audio":
                joined[name] = _padded_at_ends(joined[name])
    media = {name: torch.cat(tensors).to(model.device) for name, tensors in joined.items()}
    arguments = inspect.signature(model.forward).parameters
    # Gemma 3 has another name for them, and lets the tokens of an image attend to each other.
    for name in {"mm_token_type_ids", "token_type_ids"} & set(arguments):
        media[name] = torch.from_numpy(mm_token_type_ids(spans, length))[None].to(model.device)
    if unknown := sorted(media.keys() - set(arguments)):
        raise EngineUnsupportedError(
            f"{type(model).__name__} does not take the tensors of the items",
            where="multi_modal_data",
            expected=f"some of {', '.join(sorted(arguments))}",
            got=", ".join(unknown),
        )
    return media


def _padded_at_ends(tensors: Sequence[Any]) -> list[Any]:
    """Return features of clips padded to the longest, as the model's processor does."""
    import torch

    longest = [max(sides) for sides in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    pads = [
        [(0, size - side) for side, size in zip(tensor.shape[1:], longest, strict=True)] for tensor in tensors
    ]
    return [
        torch.nn.functional.pad(tensor, [*itertools.chain(*reversed(pad))])
        for tensor, pad in zip(tensors, pads, strict=True)
    ]


@contextmanager
def stray_pads(model: Any, ids: Any, sidecars: Sequence[MultiModalData]) -> Iterator[None]:
    """Treat pad tokens without an image, which a model may sample, as ordinary tokens of prompts `(rows, n)`.

    Transformers takes every pad token for an image's. So the model gets a stray one under another id, and its
    embedding is replaced by the pad's own.
    """
    import torch

    pads: set[Any] = {getattr(model.config, name, None) for name in _PAD_SETTINGS} - {None}
    stray = torch.isin(ids, torch.tensor(list(pads), device=ids.device))
    for row, data in enumerate(sidecars):
        for place in itertools.chain(*data.mm_placeholders.values()):
            embeds = torch.from_numpy(place.is_embed).to(ids.device)
            stray[row, place.offset : place.offset + place.length] &= ~embeds
    if not bool(stray.any()):
        yield
        return
    meant = ids[stray]
    ids[stray] = next(token for token in itertools.count() if token not in pads)
    embedding = model.get_input_embeddings()

    def embed_as_meant(_: Any, inputs: tuple[Any, ...], output: Any) -> Any:
        if inputs[0].shape == ids.shape:
            output = output.clone()
            output[stray] = embedding.weight[meant].to(output.dtype)
        return output

    handle = embedding.register_forward_hook(embed_as_meant)
    try:
        yield
    finally:
        handle.remove()
