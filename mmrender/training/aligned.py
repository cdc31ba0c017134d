"""Whether samples can be trained on together, and what is aligned to their tokens beyond one number each."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mmrender.errors import BatchError
from mmrender.training.batch import Segment
from mmrender.training.families import ModelFamily
from mmrender.trajectory.engine_data import RoutedExperts
from mmrender.trajectory.sample import TrainingSample

_OPTIONAL = ("logprobs", "advantages", "rewards", "routed_experts")


def check_samples(
    samples: Sequence[tuple[TrainingSample, str]], family: ModelFamily, pad_token_id: int
) -> None:
    """Check each sample, given with its name, and that all hold the same things.

    Raises:
        BatchError: A sample has no token, a loss on its first one, a value that is not finite, fewer or more
            router choices than tokens, or an image's token where there is no image; or samples differ in
            which of advantages, rewards and router choices they have.
    """
    if pad_token_id in family.feature_token_ids.values():
        raise BatchError(
            "the pad token stands for images",
            where="pad_token_id",
            expected=f"none of {sorted(family.feature_token_ids.values())}",
            got=str(pad_token_id),
        )
    for sample, name in samples:
        if len(sample) == 0:
            raise BatchError("a sample has no token", where=name)
        if sample.loss_mask[0]:
            raise BatchError(
                "the first token of a sample has nothing that it could be predicted from",
                where=f"{name}.loss_mask[0]",
                expected="False",
                got="True",
            )
        _check_finite(sample, name)
        check_feature_tokens(sample, name, family)
        _check_experts(sample, name, *samples[0])
        for key in _OPTIONAL:
            given = [getattr(one, key) is not None for one in (samples[0][0], sample)]
            if given[0] != given[1]:
                raise BatchError(
                    "samples of one batch hold the same things",
                    where=f"{name}.{key}",
                    expected=f"{'some' if given[0] else 'none'}, as {samples[0][1]} has",
                    got="some" if given[1] else "none",
                )


def _check_finite(sample: TrainingSample, name: str) -> None:
    for key in ("logprobs", "advantages", "rewards"):
        values = getattr(sample, key)
        if values is not None and not np.isfinite(values).all():
            place = int(np.flatnonzero(~np.isfinite(values))[0])
            where = f"{name}.{key}[{place}]"
            raise BatchError(
                "a value is not finite", where=where, expected="a number", got=str(values[place])
            )


def check_feature_tokens(sample: TrainingSample, name: str, family: ModelFamily) -> None:
    """Check that the tokens which stand for features are those of the placeholders, and no others.

    Models find the places of features by token id, so a pad token that was sampled or typed would take the
    features of an image, and shift those of all images after it.

    Raises:
        BatchError: Such a token stands outside of the placeholders, or another token within.
    """
    feature_ids = family.feature_token_ids
    if not feature_ids:
        return
    types = sample.mm_token_type_ids
    stray = np.flatnonzero(np.isin(sample.token_ids, list(feature_ids.values())) & (types == 0))
    if len(stray):
        place = int(stray[0])
        raise BatchError(
            "a token that stands for images stands where there is none",
            where=f"{name}.token_ids[{place}]",
            expected="such tokens within placeholders only",
            got=f"token {sample.token_ids[place]}, sampled or typed",
            remedy="Leave the sample out, or truncate it before this token: the model cannot take it as text",
        )
    if "image" not in feature_ids:
        return
    wrong = np.flatnonzero((types == 1) & (sample.token_ids != feature_ids["image"]))
    if len(wrong):
        place = int(wrong[0])
        raise BatchError(
            "a placeholder holds another token than the one that stands for images",
            where=f"{name}.token_ids[{place}]",
            expected=str(feature_ids["image"]),
            got=str(sample.token_ids[place]),
        )


def _check_experts(sample: TrainingSample, name: str, first: TrainingSample, first_name: str) -> None:
    experts = sample.routed_experts
    if experts is None or first.routed_experts is None:
        return
    length = len(sample)
    if experts.start != 0 or experts.stop not in (length - 1, length):
        raise BatchError(
            "router choices do not cover the tokens",
            where=f"{name}.routed_experts",
            expected=f"rows for the tokens 0 to {length - 2} or {length - 1}",
            got=f"{experts.start} to {experts.stop - 1}",
        )
    if experts.data.shape[1:] != first.routed_experts.data.shape[1:]:
        raise BatchError(
            "router choices are of different models",
            where=f"{name}.routed_experts",
            expected=f"(layers, top_k) = {first.routed_experts.data.shape[1:]}, as {first_name} has",
            got=str(experts.data.shape[1:]),
        )


def placed_experts(
    places: Sequence[tuple[int, Segment, TrainingSample]], shape: tuple[int, int], like: RoutedExperts
) -> npt.NDArray[Any]:
    """Return router choices `(rows, width, layers, top_k)`, of uint8 where they fit it, else int32.

    A token without a row of choices has the experts 0 to top_k - 1: distinct, as a router's are.

    Args:
        places: `(row, segment, sample)`, each sample with router choices.
        shape: `(rows, width)`.
        like: Router choices that say the form where no sample is placed.
    """
    found = [(row, span, sample.routed_experts.data) for row, span, sample in places if sample.routed_experts]
    _, layers, top_k = like.shape
    narrow = all(data.dtype == np.uint8 for data in [data for _, _, data in found] or [like.data])
    out = np.empty((*shape, layers, top_k), np.uint8 if narrow else np.int32)
    out[...] = np.arange(top_k)
    for row, span, data in found:
        out[row, span.start : span.start + len(data)] = data
    return out
