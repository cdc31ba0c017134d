"""Sound tracks of videos, for omni models that read them between the frames (`use_audio_in_video`).

PyAV decodes a track, and channels and rate are treated as those of a clip. The tokens of a video and of its
track alternate in one placeholder, by the rule of the model's processor. They stay two items: the placeholder
is the range of both, and each marks its own features in it, as inference servers do.
"""

import time
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, Final

import msgspec
import numpy as np
from blake3 import blake3

from mmrender.errors import MediaDecodeError, ProcessorError, located
from mmrender.media.audio import LoadedAudio, Samples, check_form, check_length, load_audio, resampled
from mmrender.media.item import TensorItem, expand_into, tensor_specs
from mmrender.media.policy import MediaPolicy
from mmrender.media.processor import AudioProcessor, Prepared, TokenRun
from mmrender.media.sources import read_source
from mmrender.media.video import as_array, open_container
from mmrender.messages import Modality, VideoPart
from mmrender.sidecar import MediaItem, Repeat, feature_count

CODECS: Final = ("aac", "mp3", "opus", "vorbis", "flac", "alac", "ac3", "pcm_s16le", "pcm_s24le", "pcm_f32le")
"""Codecs of sound that are decoded."""
_SECONDS: Final = ("video_second_per_grid", "second_per_grid_ts")
"""Names of the tensor that holds the duration of a time step."""


def is_encoded(part: VideoPart) -> bool:
    """Whether a video is a file, not frames."""
    source = part.source
    return source is not None and not isinstance(source, tuple | list) and as_array(source) is None


def has_track(part: VideoPart) -> bool:
    """Whether a video may have a sound track."""
    return part.sound is not None or is_encoded(part)


def load_track(part: VideoPart, rate: int, policy: MediaPolicy, where: str) -> LoadedAudio | None:
    """Load the sound track of a video, or return None for a silent one.

    Args:
        part: The video.
        rate: Samples per second of the result.
        policy: Limits of decoding.
        where: Path of the part, for errors.

    Raises:
        MediaError: As for `load_audio`. Or the codec is not supported.
        MissingDependencyError: PyAV or soxr is not installed.
    """
    if part.sound is not None:
        source, own_rate = part.sound.source, part.sound.sampling_rate
        return load_audio(source, rate, policy, source_rate=own_rate, where=f"{where}.audio")
    if not is_encoded(part):
        return None
    with located(where):
        track = policy.decode(_decode, read_source(part.source, policy))
        if track is None:
            return None
        samples = resampled(*track, rate)
        samples.flags.writeable = False
        return LoadedAudio(samples, rate, policy=policy)


def _decode(data: bytes, policy: MediaPolicy) -> tuple[Samples, int] | None:
    """Decode a sound track to the average of its channels, and its rate."""
    started = time.monotonic()
    with open_container(data, policy) as container:
        # It found the container's format by PyAV, which is therefore installed.
        from av import AudioResampler

        stream: Any = container.streams.best("audio")
        if stream is None:
            return None
        codec = None if stream.codec_context is None else stream.codec_context.codec.canonical_name
        if codec not in CODECS:
            raise MediaDecodeError(
                "the codec of the sound track is not supported",
                expected=", ".join(CODECS),
                got=codec or "an unknown codec",
                remedy="Open the model without use_audio_in_video, or encode the track anew.",
            )
        stream.codec_context.options = {"err_detect": "explode"}
        rate, channels = stream.codec_context.sample_rate, stream.codec_context.channels
        planes = AudioResampler(format="fltp")
        blocks: list[Samples] = []
        count = 0
        for frame in container.decode(stream):
            if frame.is_corrupt or frame.sample_rate != rate:
                raise MediaDecodeError(
                    "the sound track is damaged", expected=f"whole frames at {rate}", got=str(frame)[:100]
                )
            policy.check_time(started, "sound track")
            count += frame.samples
            check_length(rate, channels, count, policy)
            blocks += [each.to_ndarray().mean(axis=0) for each in planes.resample(frame)]
        check_form(rate, channels, count, policy)
    return np.concatenate(blocks), rate


def interleaved(audio: AudioProcessor, video: MediaItem, track: MediaItem) -> tuple[Prepared, Prepared]:
    """Return a video and its sound track as items of one range, each with its own features.

    Raises:
        ProcessorError: The model's processor has no rule for it.
    """
    if not isinstance(video, TensorItem) or not isinstance(track, TensorItem):
        raise ProcessorError("items of this class cannot be joined", got=type(video).__name__)

    tokens = {
        item.modality: {piece.token for piece in item.expansion if isinstance(piece, Repeat) and piece.embeds}
        for item in (video, track)
    }
    order = cache(partial(_order, audio, video, track, tokens))

    def joined(item: Any, other: MediaItem) -> Prepared:
        identity = blake3(f"{item.identity} with {other.identity}".encode()).hexdigest()

        def finish() -> MediaItem:
            own = tokens[item.modality]
            expansion = tuple(Repeat(token, count, token in own) for token, count in order())
            whole: MediaItem = msgspec.structs.replace(item, identity=identity, expansion=expansion)
            return whole

        return Prepared(identity, finish)

    return joined(video, track), joined(track, video)


def _order(
    audio: AudioProcessor, video: MediaItem, track: MediaItem, tokens: Mapping[Modality, set[str]]
) -> Sequence[TokenRun]:
    """Return the tokens of both in the order of their times, as many of each as they have by themselves."""
    counts = {item.modality: feature_count(item.expansion) for item in (video, track)}
    frames = video.grid[0]
    runs = audio.alternate(frames, counts["video"] // frames, _seconds(video), counts["audio"])
    for kind, own in tokens.items():
        if sum(count for token, count in runs if token in own) != counts[kind]:
            raise ProcessorError(
                f"the model's processor writes another number of tokens for a {kind} with a sound track",
                expected=str(counts[kind]),
                got=str(runs),
            )
    return runs


def _seconds(video: MediaItem) -> float:
    """Return the duration of a time step of a video."""
    specs = tensor_specs(video)
    name = next((name for name in _SECONDS if name in specs), None)
    if name is None:
        raise ProcessorError(
            "the times of this video are unknown, and its sound track cannot be joined with it",
            expected=" or ".join(_SECONDS),
            got=", ".join(specs),
        )
    values = np.zeros(specs[name].shape, specs[name].dtype)
    expand_into(video, {name: values})
    return float(values.reshape(-1)[0])
