"""A prompt in chunks, tokens and images in turn, and what a server makes of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from mmrender.errors import InputError, MediaDecodeError
from mmrender.media.policy import MediaPolicy
from mmrender.media.sources import describe, read_source, sniff
from mmrender.spans import PlaceholderRange

ImageFormat: TypeAlias = Literal["png", "jpeg"]


@dataclass(frozen=True, slots=True)
class EncodedTextChunk:
    """Tokens that stand in the prompt as they are."""

    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class ImageChunk:
    """An encoded image.

    `expected_tokens` is the number of placeholder tokens that the caller counts on; None takes what comes.
    """

    data: bytes
    format: ImageFormat
    expected_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ImageAssetPointerChunk:
    """An encoded image at a URL or path, read under a media policy. See `ImageChunk`."""

    location: str
    format: ImageFormat
    expected_tokens: int | None = None


Chunk: TypeAlias = EncodedTextChunk | ImageChunk | ImageAssetPointerChunk


@dataclass(frozen=True, slots=True)
class ModelInput:
    """A prompt in chunks, in order."""

    chunks: Sequence[Chunk]


@dataclass(frozen=True, slots=True)
class RenderedModelInput:
    """A prompt as the model takes it.

    Attributes:
        prompt_ids: The text chunks' tokens, with the placeholder tokens of each image in its place.
        multi_modal_kwargs: By modality, vLLM's base64 item of each image, in prompt order; None without
            images.
        multi_modal_placeholders: By modality, where each image stands in `prompt_ids`; None without images.
        mm_hashes: By modality, the server's hash of each image; None without images.
    """

    prompt_ids: list[int]
    multi_modal_kwargs: Mapping[str, list[str]] | None = None
    multi_modal_placeholders: Mapping[str, list[PlaceholderRange]] | None = None
    mm_hashes: Mapping[str, list[str]] | None = None


def check_input(given: object, where: str) -> ModelInput:
    """Return `given` if it is a `ModelInput` that can be rendered.

    Raises:
        InputError: It is not, or a chunk of it is not, or a text chunk holds what is no token id.
    """
    if not isinstance(given, ModelInput):
        raise InputError("not a model input", where=where, expected="ModelInput", got=type(given).__name__)
    if not given.chunks:
        raise InputError("the model input is empty", where=f"{where}.chunks", expected="at least one chunk")
    for index, chunk in enumerate(given.chunks):
        _check_chunk(chunk, f"{where}.chunks[{index}]")
    return given


def _check_chunk(chunk: object, where: str) -> None:
    if isinstance(chunk, EncodedTextChunk):
        for position, token in enumerate(chunk.tokens):
            if type(token) is not int or token < 0:
                raise InputError(
                    "not a token id",
                    where=f"{where}.tokens[{position}]",
                    expected="an integer of 0 or more",
                    got=repr(token)[:80],
                )
    elif not isinstance(chunk, ImageChunk | ImageAssetPointerChunk):
        raise InputError(
            "not a chunk",
            where=where,
            expected="EncodedTextChunk, ImageChunk or ImageAssetPointerChunk",
            got=type(chunk).__name__,
        )
    elif chunk.format not in ("png", "jpeg"):
        raise InputError(
            "unknown image format",
            where=f"{where}.format",
            expected="'png' or 'jpeg'",
            got=repr(chunk.format),
        )


def image_bytes(chunk: ImageChunk | ImageAssetPointerChunk, policy: MediaPolicy, where: str) -> bytes:
    """Return the encoded image of a chunk.

    Raises:
        MediaError: The policy forbids it, it cannot be read, or it is not of the format that the chunk names.
    """
    source = chunk.data if isinstance(chunk, ImageChunk) else chunk.location
    data = read_source(source, policy, where=where)
    if sniff(data) != chunk.format.upper():
        raise MediaDecodeError(
            "the image is not of the format that its chunk names",
            where=where,
            expected=chunk.format.upper(),
            got=sniff(data) or describe(data),
        )
    return data
