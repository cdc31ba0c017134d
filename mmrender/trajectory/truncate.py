"""Cutting a prompt or a sample to a length, at whole images, with the sidecar and all aligned arrays."""

from dataclasses import replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from mmrender.errors import TrajectoryError, check_count
from mmrender.sidecar import MultiModalData
from mmrender.tokens.rendered import RenderedTokens
from mmrender.trajectory.prefix import media_before
from mmrender.trajectory.sample import RESTRICTED, TrainingSample

Prompt = TypeVar("Prompt", RenderedTokens, TrainingSample)


def whole_media_length(sidecar: MultiModalData, max_tokens: int) -> int:
    """Return the largest length up to `max_tokens` at which no placeholder range is cut.

    Raises:
        TrajectoryError: `max_tokens` is negative.
    """
    check_count("max_tokens", max_tokens, minimum=0, error=TrajectoryError)
    before = media_before(sidecar.spans(), max_tokens)
    cut = bool(before) and before[-1].stop > max_tokens
    return before[-1].start if cut else max_tokens


def truncate(prompt: Prompt, max_tokens: int) -> Prompt:
    """Return a prompt or sample of at most `max_tokens` tokens, with whole images.

    All values that are aligned to the tokens are cut with them: attribution, masks, router choices, the
    sidecar, the spans of restricted completions. Rewards beyond the cut move to the last token left to train
    on, as the reward of a whole step lies on its end, so their sum stays. A prompt that fits is returned as
    it is. `text` and `roles` of a rendered prompt stay whole.

    Raises:
        TrajectoryError: `max_tokens` is negative, or rewards are cut and no token is left to train on.
    """
    if len(prompt) <= max_tokens:
        return prompt
    length = whole_media_length(prompt.multi_modal_data, max_tokens)
    kept = media_before(prompt.multi_modal_data.spans(), length)
    sidecar = MultiModalData.of((span.range, span.item) for span in kept)
    if isinstance(prompt, TrainingSample):
        fields = prompt.aligned.cut(0, length).fields() | {"rewards": _moved_rewards(prompt, length)}
        prompt_length = None if prompt.prompt_length is None else min(prompt.prompt_length, length)
        extra = {name: value for name, value in prompt.extra.items() if name != RESTRICTED}
        left = [span for span in prompt.extra.get(RESTRICTED, ()) if span[0] < length]
        if left:
            extra[RESTRICTED] = tuple((start, min(stop, length), *kinds) for start, stop, *kinds in left)
        fields |= {"multi_modal_data": sidecar, "prompt_length": prompt_length, "extra": extra}
        return replace(prompt, rendered=None, **fields)
    spans = tuple(span._replace(stop=min(span.stop, length)) for span in prompt.spans if span.start < length)
    return replace(prompt, token_ids=prompt.token_ids[:length], spans=spans, multi_modal_data=sidecar)


def _moved_rewards(sample: TrainingSample, length: int) -> npt.NDArray[np.float32] | None:
    """Return the rewards of the kept tokens, with all later rewards on the last trained token."""
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
