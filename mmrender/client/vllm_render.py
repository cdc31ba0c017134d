"""One image or audio clip as a vLLM server processes it, by its render route, and errors of comparing it."""

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from mmrender.client.reply import decode_as
from mmrender.client.transport import Transport
from mmrender.client.vllm_fields import PIXEL_DTYPES, PixelDtype
from mmrender.errors import (
    EngineMismatchError,
    EngineReplyError,
    EngineStatusError,
    EngineUnsupportedError,
)
from mmrender.messages import Modality

RENDER_PATH: Final = "/v1/chat/completions/render"
_NOUN: Final = {"image": "image", "video": "video", "audio": "audio clip"}


class Range(msgspec.Struct):
    """A placeholder range as vLLM writes it."""

    offset: int
    length: int


class _Features(msgspec.Struct):
    mm_hashes: dict[str, list[str]] = {}
    mm_placeholders: dict[str, list[Range]] = {}
    kwargs_data: dict[str, list[str | None]] | None = None


class _Rendered(msgspec.Struct):
    token_ids: list[int]
    features: _Features | None = None


class ServedItem(msgspec.Struct, frozen=True):
    """One image or clip as a server processed it: its placeholder tokens, base64 item and hash."""

    tokens: tuple[int, ...]
    item: str
    mm_hash: str

    @property
    def nbytes(self) -> int:
        """Bytes it keeps alive, approximately."""
        return len(self.item) + 8 * len(self.tokens)


async def render_item(
    transport: Transport, model: str, data_url: str, modality: Modality = "image"
) -> ServedItem:
    """Let a vLLM server process one image or clip, given as a `data:` URL."""
    where = f"{transport.base_url}{RENDER_PATH}"
    noun = _NOUN[modality]
    part = {"type": f"{modality}_url", f"{modality}_url": {"url": data_url}}
    body = {"model": model, "messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
    try:
        reply = await transport.request("POST", RENDER_PATH, json=body, idempotent=True)
    except EngineStatusError as error:
        lacks_route = error.status == 404 and "model" not in error.body
        if error.status in (403, 405) or lacks_route:
            raise EngineUnsupportedError(
                f"the server does not render {noun}s",
                where=where,
                got=f"status {error.status}: {error.body[:200]}",
                remedy="Start vLLM with --enable-scale-out, or start `vllm launch render`",
            ) from error
        raise
    rendered = await asyncio.to_thread(decode_as, reply.body, _Rendered, where=where)
    features = rendered.features or _Features()
    for name in ("mm_hashes", "mm_placeholders", "kwargs_data"):
        members: Mapping[str, list[Any]] = getattr(features, name) or {}
        counts = {kind: len(values) for kind, values in members.items() if values}
        if counts != {modality: 1} or members[modality] == [None]:
            raise EngineReplyError(
                f"the server did not render one {noun}",
                where=f"{where} features.{name}",
                expected=f"one of {modality!r}, with its data",
                got=str(counts),
            )
    ((offset, length),) = ((each.offset, each.length) for each in features.mm_placeholders[modality])
    if offset < 0 or length <= 0 or offset + length > len(rendered.token_ids):
        raise EngineReplyError(
            "the server rendered a placeholder outside the prompt",
            where=f"{where} features.mm_placeholders",
            expected=f"tokens within [0, {len(rendered.token_ids)})",
            got=f"[{offset}, {offset + length})",
        )
    (item,), (mm_hash,) = (features.kwargs_data or {})[modality], features.mm_hashes[modality]
    return ServedItem(tuple(rendered.token_ids[offset : offset + length]), item or "", mm_hash)


def mismatch(
    subject: str, where: str, served: str, ours: str, *, modality: Modality = "image"
) -> EngineMismatchError:
    """Return the error of an item that the server processes in another way. `subject` is what differs."""
    return EngineMismatchError(
        f"the server processes an {_NOUN[modality]} differently than the renderer: {subject}",
        where=where,
        expected=f"as the server has it: {served}",
        got=f"here: {ours}",
        remedy="Render with the files and processor settings of the model that the server runs",
    )


def known_dtype(dtypes: set[str], where: str, modality: Modality = "image") -> PixelDtype:
    """Return the dtype of the served floating-point tensors."""
    dtype = next((known for known in PIXEL_DTYPES if dtypes == {known}), None)
    if dtype is None:
        subject = "pixel dtypes" if modality == "image" else "dtypes of features"
        expected = f"one of {', '.join(PIXEL_DTYPES)}"
        raise mismatch(subject, where, ", ".join(sorted(dtypes)) or "nothing", expected, modality=modality)
    return dtype


def dtype_of(tensor: Any) -> str:
    """Return the name of a tensor's dtype."""
    return str(getattr(tensor, "dtype", type(tensor).__name__))
