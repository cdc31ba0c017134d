"""Cutting a sample to a length, at a whole image and with everything that is aligned to its tokens."""

from mmrender.errors import BatchError
from mmrender.trajectory.sample import TrainingSample
from mmrender.trajectory.trimming import trim_to_length, whole_media_length


def truncate(sample: TrainingSample, max_tokens: int) -> TrainingSample:
    """Return the sample's first tokens, at most `max_tokens` of them.

    A cut that would fall within an image's placeholder falls before it, whatever the family: nothing is read
    but the placeholder ranges. Items after the cut are left out with their ranges and hashes. Rewards after
    it are added to that of the last token left to train on; see `mmrender.trajectory.trim_to_length`.

    Raises:
        BatchError: Nothing would be left.
        TrajectoryError: `max_tokens` is negative, or rewards are cut and no token is left to train on.
    """
    length = len(sample)
    if length > max_tokens:
        length = whole_media_length(sample.multi_modal_data, max_tokens)
    if not length:
        raise BatchError(
            "nothing is left of a sample",
            where=sample.sample_id or "sample",
            expected="room for a token before the first image",
            got=f"max_tokens={max_tokens}",
        )
    return trim_to_length(sample, max_tokens)
