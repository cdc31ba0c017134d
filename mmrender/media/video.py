"""Videos: any source in, frames out, given one by one or decoded, under a `MediaPolicy`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mmrender.errors import MediaDecodeError, MediaError
from mmrender.media.decode import decoder
from mmrender.media.frames import Timeline, Video
from mmrender.media.load import LoadedImage, load_image
from mmrender.media.policy import MediaPolicy
from mmrender.media.sources import read_source
from mmrender.messages import VideoPart


@contextmanager
def open_video(part: VideoPart, policy: MediaPolicy, where: str) -> Iterator[Video]:
    """Open a video, to be used within the context.

    Raises:
        MediaError: As for `load_image`; its times do not fit its frames; or it holds none.
        MissingDependencyError: It is encoded, and PyAV is not installed (extra `video`).
    """
    try:
        array = as_array(part.source)
        if array is not None:
            _check_array(array)
        elif not isinstance(part.source, tuple | list):
            with _opened(part, policy) as video:
                yield video
            return
        given: Sequence[Any] = part.source if array is None else array
        if not len(given):
            raise MediaDecodeError("the video has no frames", expected="at least 1", got="0")
        policy.check_frames(len(given))
        yield Video(_timeline(part, len(given)), lambda wanted: _loaded(given, wanted, policy), policy)
    except MediaError as error:
        error.at(where)
        raise


@contextmanager
def _opened(part: VideoPart, policy: MediaPolicy) -> Iterator[Video]:
    for name in ("fps", "times", "frames_indices", "total_num_frames", "duration"):
        if getattr(part, name) is not None:
            raise MediaDecodeError(
                f"an encoded video knows its own times, yet {name} is given",
                expected="no times beside an encoded video; the processor's settings say what is sampled",
                got=repr(getattr(part, name))[:80],
                remedy="Leave it out, or decode the video yourself and pass its frames",
            )
    data = read_source(part.source, policy)
    if policy.processes is None:
        with decoder(data, policy) as video:
            yield Video(video.timeline, video.frames, policy)
    else:
        timeline = policy.decode(_timeline_of, data)
        yield Video(timeline, lambda wanted: iter(policy.decode(_frames_of, data, [*wanted])), policy)


def _timeline_of(data: bytes, policy: MediaPolicy) -> Timeline:
    with decoder(data, policy) as video:
        return video.timeline


def _frames_of(data: bytes, policy: MediaPolicy, wanted: list[int]) -> list[LoadedImage]:
    with decoder(data, policy) as video:
        return list(video.frames(wanted))


def _loaded(frames: Sequence[Any], wanted: Sequence[int], policy: MediaPolicy) -> Iterator[LoadedImage]:
    for index in wanted:
        yield load_image(frames[index], policy, where=f"frame {index}")


def as_array(source: Any) -> Any:
    """Return an array or torch tensor as a numpy array, without importing torch; None for anything else."""
    if isinstance(source, np.ndarray):
        return source
    if type(source).__module__.partition(".")[0] == "torch" and hasattr(source, "detach"):
        return source.detach().cpu().numpy()
    return None


def _check_array(array: Any) -> None:
    if array.dtype == np.uint8 and array.ndim == 4 and array.shape[3] == 3:
        return
    remedy = "Convert it to uint8 with values in 0..255 yourself"
    if array.ndim == 4 and array.shape[1] == 3 and array.shape[3] != 3:
        remedy = "Channels go last: video.transpose(0, 2, 3, 1), or permute(0, 2, 3, 1) in torch"
    elif array.ndim == 3:
        remedy = "Three dimensions are an image: pass [image] for a video of one frame"
    raise MediaDecodeError(
        "this array is not a video",
        expected="uint8 of shape (frames, height, width, 3)",
        got=f"{array.dtype} of shape {array.shape}",
        remedy=remedy,
    )


def _timeline(part: VideoPart, count: int) -> Timeline:
    """Return the times of frames that are given one by one."""
    times, indices = part.times, part.frames_indices
    for name, given in (("times", times), ("frames_indices", indices)):
        if given is not None and (len(given) != count or list(given) != sorted(given)):
            raise MediaDecodeError(
                f"{name} do not fit the frames",
                expected=f"{count} numbers, one for each frame, none below the one before",
                got=f"{len(given)} numbers" + ("" if len(given) != count else " that fall"),
            )
    if times is not None:
        if (part.fps, indices, part.total_num_frames) != (None, None, None):
            raise MediaDecodeError(
                "times say all of when frames are shown",
                expected="times alone, or fps with frames_indices",
                got="both",
            )
        # One frame in a second makes a frame's number its time.
        lasting = (times[-1] - times[0]) * count / (count - 1) if count > 1 else 0.0
        return Timeline(lasting or 1.0, 1.0, part.duration, tuple(times))
    total = part.total_num_frames
    if indices is None and total not in (None, count):
        raise MediaDecodeError(
            "the number of frames is not that of the video",
            expected=f"total_num_frames={count}, or frames_indices of those that were sampled",
            got=str(total),
        )
    if indices is not None and total is not None and indices[-1] >= total:
        raise MediaDecodeError(
            "a frame is numbered beyond the end of its video",
            expected=f"numbers below {total}",
            got=str(indices[-1]),
        )
    if total is None:
        total = count if indices is None else max(count, indices[-1] + 1)
    return Timeline(total, part.fps, part.duration, indices)
