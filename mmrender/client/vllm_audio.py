"""The handshake about audio with a vLLM server: a silent clip as long as an item, and what it became.

The server shows the names, the dtypes and the shapes of its features, and the number of tokens, which must be
ours. Values are not compared: an item keeps features and no samples, from which the server could make them.
"""

import io
import wave
from typing import Any

from mmrender.client.vllm_fields import WireForm, collate_items, item_tensors, layout_for
from mmrender.client.vllm_render import dtype_of, known_dtype, mismatch
from mmrender.media.encoded import EncodedImage
from mmrender.media.vllm_items import KwargsItem
from mmrender.sidecar import MediaItem


def silent_clip(item: MediaItem) -> tuple[EncodedImage, bool]:
    """Return silence with the rate and the number of samples of an item, which are not the item's own."""
    rate, count = item.size
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(1)
        file.setframerate(rate)
        file.writeframes(b"\x80" * count)
    return EncodedImage(buffer.getvalue(), "audio/wav"), False


def compare_clip(
    item: MediaItem, tokens: tuple[int, ...], served_tokens: tuple[int, ...], served: KwargsItem, where: str
) -> WireForm:
    """Return the form of a server's features, which must have the names and shapes of an item's.

    Args:
        item: The clip.
        tokens: Its tokens of features.
        served_tokens: The tokens that the server writes for a clip of its length, and around it.
        served: The server's tensors.
        where: The server's route.

    Raises:
        EngineMismatchError: The server has another number of tokens, or other tensors.
        EngineUnsupportedError: It is not known how the server joins its tensors.
    """
    count = served_tokens.count(tokens[0])
    if (tokens[0],) * count != tokens:
        theirs = f"{count} of the token {tokens[0]}"
        raise mismatch("placeholder tokens", where, theirs, f"{len(tokens)} of it", modality="audio")
    kinds = {name: type(elem.field).__name__.removesuffix("Field").lower() for name, elem in served.items()}
    layout = layout_for(served.keys(), kinds, modality="audio")
    dtypes = {dtype_of(elem.data) for name, elem in served.items() if "mask" not in name}
    form = WireForm(layout, known_dtype({each for each in dtypes if "float" in each}, where, "audio"))
    (ours,) = collate_items(layout, [item_tensors(item, form)])
    if ours.keys() != served.keys():
        raise mismatch("fields", where, ", ".join(sorted(served)), ", ".join(sorted(ours)), modality="audio")
    for name, elem in ours.items():
        shapes = [_described(tensor) for tensor in (served[name].data, elem.data)]
        is_unused = name == "feature_attention_mask" and "audio_feature_lengths" in served
        if shapes[0] != shapes[1] and not is_unused:
            raise mismatch(name, where, *shapes, modality="audio")
    return form


def _described(tensor: Any) -> str:
    """Return the kind and shape of a tensor. Releases of Transformers have integers of other widths."""
    kind = dtype_of(tensor)
    if "int" in kind:
        kind = "integers"
    return f"{kind} {list(getattr(tensor, 'shape', ()))}"
