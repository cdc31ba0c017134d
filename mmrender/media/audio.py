"""Audio: any source in, samples of one channel at the model's rate out, under a `MediaPolicy`.

The reference is Transformers' `load_audio(backend="soundfile")`: libsndfile decodes to float32, channels are
averaged, soxr resamples by its `HQ` recipe, and the result is cut to the rounded-up number of samples. Wheels
of soundfile and soxr (extra `audio`) hold their libraries for every platform. torchcodec, which `load_audio`
prefers if it is installed, needs a system's FFmpeg and resamples in another way.

Headers are not trusted: libsndfile reads a shortened WAV or Ogg file without a word, so their ends are
checked here. Samples are counted while they are decoded in blocks, and only their average over channels is
kept.
"""

import io
import math
import struct
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from mmrender.errors import MediaDecodeError, MediaLimitError, importing, located
from mmrender.media.load import damaged, named_errors
from mmrender.media.policy import MediaPolicy
from mmrender.media.sources import AUDIO_FORMATS, format_name, read_source
from mmrender.media.video import as_array

MAX_CHANNELS: Final = 8
"""Maximum number of channels of a clip."""
RATES: Final = (1_000, 384_000)
"""Lowest and highest sampling rate of a source, in samples per second."""
_BLOCK: Final = 1 << 16
"""Frames that are decoded at once."""
_UNKNOWN_SIZE: Final = 0xFFFFFFFF
"""Size of a WAV file that was written to a pipe, and so ends where the file does."""
_LEVELS: Final = {"int16": 1 << 15, "int32": 1 << 31}
"""Divisor of integer samples, by dtype, as libsndfile divides them."""

Samples = npt.NDArray[np.float32]
PackedAudio: TypeAlias = tuple[bytes, MediaPolicy]
"""A file that holds samples in a fraction of the bytes, and limits of decoding it."""


@dataclass(frozen=True, slots=True)
class LoadedAudio:
    """One channel of samples.

    Attributes:
        samples: `(n,)`, float32, read-only.
        rate: Samples per second.
        file: The file that was decoded, or None for an array.
        policy: Limits under which the file may be decoded again.
    """

    samples: Samples = field(repr=False)
    rate: int
    file: bytes | None = field(default=None, repr=False)
    policy: MediaPolicy = field(default_factory=MediaPolicy, repr=False)

    @property
    def seconds(self) -> float:
        """The duration."""
        return len(self.samples) / self.rate

    def packed(self) -> PackedAudio | None:
        """Return the smallest file from which `load_audio` restores the samples: theirs, or FLAC for 16 bits.

        None if features are as small.
        """
        bound = 2 * len(self.samples)
        if self.file is not None and len(self.file) < bound:
            return self.file, self.policy
        scale = np.float32(_LEVELS["int16"])
        levels = np.clip(np.rint(self.samples * scale), -scale, scale - 1).astype(np.int16)
        # Compared as bits: -0.0 must come back as it was.
        if not np.array_equal((levels / scale).view(np.uint32), self.samples.view(np.uint32)):
            return None
        try:
            import soundfile
        except (ImportError, OSError):
            return None
        out = io.BytesIO()
        soundfile.write(out, levels, self.rate, format="FLAC", subtype="PCM_16")
        return (out.getvalue(), _UNBOUNDED) if out.tell() < bound else None


_UNBOUNDED: Final = MediaPolicy(
    max_bytes=1 << 40, max_audio_seconds=1 << 40, max_audio_bytes=1 << 40, decode_timeout=math.inf
)
"""Limits of a file that was written here."""


def load_audio(
    source: Any,
    rate: int,
    policy: MediaPolicy | None = None,
    *,
    source_rate: int | None = None,
    where: str | None = None,
) -> LoadedAudio:
    """Load one audio clip.

    Args:
        source: As `AudioPart.source`, or another source that `mmrender.media.sources` reads.
        rate: Samples per second of the result.
        policy: Limits of reading. The default policy if None.
        source_rate: Samples per second of an array.
        where: Path of the source for error messages, such as `messages[0].content[1]`.

    Raises:
        MediaBlockedError: The policy forbids the source.
        MediaLimitError: Too many bytes, samples, channels or seconds, or too slow.
        MediaFetchError: A file or URL that cannot be read.
        MediaDecodeError: Not audio, or damaged or truncated, or without samples.
        MissingDependencyError: soundfile or soxr is not installed.
    """
    policy = MediaPolicy() if policy is None else policy
    with located(where):
        array, file = as_array(source), None
        if array is not None:
            mono, found = _of_array(array, source_rate, policy)
        else:
            if source_rate is not None:
                raise MediaDecodeError(
                    "sampling_rate cannot be set for encoded audio, which contains its own",
                    expected="no sampling_rate",
                    got=str(source_rate),
                    remedy="Leave it out, or decode the clip yourself and pass an array",
                )
            file = read_source(source, policy)
            mono, found = policy.decode(_decode, file)
        if not np.isfinite(mono).all():
            raise MediaDecodeError("the audio holds samples that are not finite", expected="finite numbers")
        samples = resampled(mono, found, rate)
        samples.flags.writeable = False
        return LoadedAudio(samples, rate, file, policy)


def _of_array(array: Any, rate: int | None, policy: MediaPolicy) -> tuple[Samples, int]:
    form = f"{array.dtype} of shape {array.shape}"
    if rate is None:
        raise MediaDecodeError(
            "the rate of this array of samples is unknown",
            expected="the array with its rate",
            got=form,
            remedy='Add it to the part: {"type": "audio", "audio": array, "sampling_rate": 16000}',
        )
    if array.ndim == 2 and min(array.shape) <= MAX_CHANNELS < max(array.shape):
        array = array if array.shape[0] <= MAX_CHANNELS else array.T
    elif array.ndim == 1:
        array = array[None]
    else:
        array = None
    divisor = None if array is None else _LEVELS.get(array.dtype.name)
    if array is None or (divisor is None and array.dtype.kind != "f"):
        raise MediaDecodeError(
            "this array is not audio",
            expected=f"floats, int16 or int32 of shape (samples,), or of up to {MAX_CHANNELS} channels with "
            "more samples",
            got=form,
            remedy="Pass one channel: a one-dimensional array",
        )
    channels, count = array.shape
    check_form(rate, channels, count, policy)
    check_length(rate, channels, count, policy)
    if divisor is not None:
        array = array.astype(np.float32 if divisor == 1 << 15 else np.float64) / divisor
    with np.errstate(over="ignore"):
        array = array.astype(np.float32)
    return array[0] if channels == 1 else array.mean(axis=0), rate


def _decode(data: bytes, policy: MediaPolicy) -> tuple[Samples, int]:
    """Decode encoded audio to the average of its channels, and its rate."""
    with _importing("soundfile"):
        import soundfile
    kind = format_name(data)
    if kind not in AUDIO_FORMATS:
        raise MediaDecodeError(
            "this is not audio that can be decoded",
            expected="WAV, FLAC, Ogg or MP3",
            got=kind,
            remedy="Decode it yourself, and pass its samples with their rate.",
        )
    if kind == "WAV audio":
        _check_wav(data)
    elif kind == "Ogg audio":
        _check_ogg(data)
    started = time.monotonic()
    blocks: list[Samples] = []
    count = 0
    with named_errors(kind), soundfile.SoundFile(io.BytesIO(data)) as file:
        rate, channels = file.samplerate, file.channels
        stated = file.frames if kind != "MP3 audio" or _states_length(data) else 0
        check_form(rate, channels, file.frames, policy)
        check_length(rate, channels, stated, policy)
        while len(block := file.read(_BLOCK, dtype="float32", always_2d=True)):
            count += len(block)
            check_length(rate, channels, count, policy)
            policy.check_time(started, "audio")
            blocks.append(block[:, 0] if channels == 1 else block.T.mean(axis=0))
        if count < stated:
            raise damaged(kind, f"{stated} samples, as its header states", str(count))
    return np.concatenate(blocks), rate


def check_form(rate: int, channels: int, count: int, policy: MediaPolicy) -> None:
    """Refuse a rate, a number of channels or a stated length before anything is decoded."""
    low, high = RATES
    if not low <= rate <= high:
        raise MediaDecodeError(
            "the sampling rate of the audio cannot be right", expected=f"{low} to {high}", got=str(rate)
        )
    if not 1 <= channels <= MAX_CHANNELS:
        raise MediaLimitError(
            "the audio has too many channels",
            expected=f"at most {MAX_CHANNELS}",
            got=str(channels),
            remedy="Mix them yourself, and pass samples with their rate.",
        )
    if count < 1:
        raise MediaDecodeError("the audio has no samples", expected="at least 1", got=str(count))


def check_length(rate: int, channels: int, count: int, policy: MediaPolicy) -> None:
    """Refuse more samples than the policy allows."""
    policy.check("max_audio_seconds", math.ceil(count / rate), got=f"{count / rate:.1f} seconds or more")
    size = 4 * count * channels
    policy.check("max_audio_bytes", size, got=f"{size} bytes or more")


def _check_wav(data: bytes) -> None:
    """Require that the samples of a WAV file are as many as its header states.

    A file that was written to a pipe states no size, and ends anywhere.
    """
    position, rate, align = 12, 0, 0
    while position + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, position)
        position += 8
        if name == b"fmt " and size >= 16 and position + 16 <= len(data):
            kind, channels, rate, byte_rate, align, bits = struct.unpack_from("<HHIIHH", data, position)
            is_pcm = kind in (1, 3)
            if is_pcm and (align != channels * -(-bits // 8) or byte_rate != rate * align):
                raise MediaDecodeError(
                    "the header of the WAV audio contradicts itself",
                    expected=f"{channels * -(-bits // 8)} bytes for {channels} channels of {bits} bits, "
                    f"{rate} times a second",
                    got=f"{align} bytes, and {byte_rate} bytes a second",
                )
        if name == b"data":
            rest = len(data) - position
            if size > rest and size != _UNKNOWN_SIZE:
                raise damaged("WAV audio", f"{size} bytes of samples, as its header states", str(rest))
            return
        position += size + size % 2
    raise damaged("WAV audio", "a part with samples", "none")


def _check_ogg(data: bytes) -> None:
    """Require that the last page of an Ogg file ends its stream and is whole."""
    last = data.rfind(b"OggS")
    header = data[last : last + 27]
    lengths = data[last + 27 : last + 27 + header[26]] if len(header) == 27 else b""
    is_whole = len(header) == 27 and len(lengths) == header[26]
    if not is_whole or not header[5] & 4 or last + 27 + len(lengths) + sum(lengths) > len(data):
        raise damaged("Ogg audio", "a last page that ends the stream", "another last page")


def _states_length(data: bytes) -> bool:
    """Whether an MP3 states its length, in place of its first frame. Otherwise it may end anywhere."""
    start = 0
    if data[:3] == b"ID3" and len(data) >= 10:
        size = data[6:10]
        start = 10 + sum((byte & 127) << 7 * (3 - place) for place, byte in enumerate(size))
    return any(name in data[start : start + 256] for name in (b"Xing", b"Info"))


def resampled(mono: Samples, rate: int, target: int) -> Samples:
    """Return samples at another rate, always as a new array."""
    if rate == target:
        return np.array(mono, np.float32)
    with _importing("soxr"):
        import soxr
    count = math.ceil(len(mono) * target / rate)
    try:
        samples = soxr.resample(mono, rate, target, quality="soxr_hq")
    except (RuntimeError, ValueError, MemoryError) as error:
        raise MediaDecodeError(
            f"the audio cannot be resampled ({error})", got=f"{rate} to {target}"
        ) from error
    return np.ascontiguousarray(np.pad(samples, (0, max(0, count - len(samples))))[:count], np.float32)


def _importing(package: str) -> AbstractContextManager[None]:
    otherwise = "pass samples at the model's own rate"
    return importing(package, "audio", "encoded audio", otherwise=otherwise)
