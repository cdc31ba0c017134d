"""Cutting a prompt or a sample to a length, at whole images, with the sidecar and all aligned arrays."""

from dataclasses import replace
from typing import overload

import numpy as np
import numpy.typing as npt

from mmrender.errors import TrajectoryError
from mmrender.spans import MultiModalData
from mmrender.tokens.rendered import RenderedTokens
from mmrender.trajectory.engine_data import RoutedExperts, WeightVersionSpan
from mmrender.trajectory.prefix import media_before
from mmrender.trajectory.sample import TrainingSample


def whole_media_length(sidecar: MultiModalData, max_tokens: int) -> int:
    """Return the largest length up to `max_tokens` at which no placeholder range is cut.

    Raises:
        TrajectoryError: `max_tokens` is negative.
    """
    if max_tokens < 0:
        raise TrajectoryError(
            "a length is negative", where="max_tokens", expected="0 or more", got=str(max_tokens)
        )
    before = media_before(sidecar.spans(), max_tokens)
    cut = bool(before) and before[-1].stop > max_tokens
    return before[-1].start if cut else max_tokens


@overload
def truncate(prompt: RenderedTokens, max_tokens: int) -> RenderedTokens: ...
@overload
def truncate(prompt: TrainingSample, max_tokens: int) -> TrainingSample: ...
def truncate(prompt: RenderedTokens | TrainingSample, max_tokens: int) -> RenderedTokens | TrainingSample:
    """Return a prompt or sample of at most `max_tokens` tokens, cut where no image is cut.

    Everything that is aligned to the tokens is cut with them: attribution, masks, advantages, router choices,
    the sidecar. Rewards of tokens that are cut are added to that of the last token left to train on, as the
    reward of a whole step is placed on its end, so their sum stays. A prompt that fits is returned as it is.
    `text` and `roles` of a rendered prompt stay whole.

    Raises:
        TrajectoryError: `max_tokens` is negative, or rewards are cut and no token is left to train on.
    """
    if len(prompt) <= max_tokens:
        return prompt
    length = whole_media_length(prompt.multi_modal_data, max_tokens)
    kept = [span for span in prompt.multi_modal_data.spans() if span.stop <= length]
    sidecar = MultiModalData.of((span.range, span.item) for span in kept)
    if isinstance(prompt, TrainingSample):
        return _truncate_sample(prompt, length, sidecar)
    spans = tuple(span._replace(stop=min(span.stop, length)) for span in prompt.spans if span.start < length)
    return replace(prompt, token_ids=prompt.token_ids[:length], spans=spans, multi_modal_data=sidecar)


def _truncate_sample(sample: TrainingSample, length: int, sidecar: MultiModalData) -> TrainingSample:
    experts = sample.routed_experts
    if experts is not None:
        kept = max(0, length - experts.start)
        experts = RoutedExperts(experts.data[:kept], experts.start) if kept else None
    versions = (
        WeightVersionSpan(version, start, min(stop, length))
        for version, start, stop in sample.weight_versions
        if start < length
    )
    return replace(
        sample,
        token_ids=sample.token_ids[:length],
        loss_mask=sample.loss_mask[:length],
        logprobs=None if sample.logprobs is None else sample.logprobs[:length],
        multi_modal_data=sidecar,
        rewards=_moved_rewards(sample, length),
        advantages=None if sample.advantages is None else sample.advantages[:length],
        routed_experts=experts,
        weight_versions=tuple(versions),
        prompt_length=None if sample.prompt_length is None else min(sample.prompt_length, length),
        rendered=None,
    )


def _moved_rewards(sample: TrainingSample, length: int) -> npt.NDArray[np.float32] | None:
    """Return the rewards of the kept tokens, those of the others added to the last one that is trained on."""
    if sample.rewards is None or not sample.rewards[length:].any():
        return None if sample.rewards is None else sample.rewards[:length]
    trained = np.flatnonzero(sample.loss_mask[:length])
    if not len(trained):
        place = length + int(np.flatnonzero(sample.rewards[length:])[-1])
        raise TrajectoryError(
            "a reward is cut off, and no token is left that it could train",
            where=f"{sample.sample_id or 'sample'}.rewards[{place}]",
            expected=f"a token of the loss mask among the first {length}",
            got="none",
            remedy="Leave the sample out, or allow more tokens",
        )
    rewards = sample.rewards[:length].copy()
    rewards[trained[-1]] += sample.rewards[length:].sum()
    return rewards
