"""Model inputs and data beside those that the cookbook's own functions make of the same tokens."""

import dataclasses
import io

import numpy as np
import pytest
import tinker
import torch
from PIL import Image
from tinker_cookbook.supervised.common import (
    create_rightshifted_model_input_and_leftshifted_targets,
    datum_from_model_input_weights,
)

from mmrender import build_training_sample
from mmrender.errors import InputError, MediaError
from mmrender.integrations.tinker import to_datum, to_model_input

PICTURES = [
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (101 + 30 * seed, 137, 3), np.uint8))
    for seed in range(3)
]


@pytest.fixture(scope="module")
def sample(renderer):
    parts = [{"type": "image", "image": picture} for picture in PICTURES]
    messages = [
        {"role": "user", "content": [*parts[:2], {"type": "text", "text": "Which?"}]},
        {"role": "assistant", "content": "The first."},
        {"role": "user", "content": [parts[2], {"type": "text", "text": "And now?"}]},
        {"role": "assistant", "content": "The third."},
    ]
    return build_training_sample(renderer, messages, weights={1: 0.5})


def test_chunks_hold_every_token_and_images_that_process_alike(sample, renderer):
    found = to_model_input(sample.token_ids.tolist(), sample.multi_modal_data)
    assert isinstance(found, tinker.ModelInput)
    assert found.length == len(sample)
    position, images = 0, 0
    for chunk in found.chunks:
        if isinstance(chunk, tinker.EncodedTextChunk):
            assert list(chunk.tokens) == sample.token_ids[position : position + chunk.length].tolist()
        else:
            span = sample.media_spans[images]
            assert (position, chunk.length) == (span.start, span.stop - span.start)
            again = Image.open(io.BytesIO(chunk.data))
            one = renderer.render([{"role": "user", "content": [{"type": "image", "image": again}]}])
            ours, theirs = (item.tensors() for item in (span.item, one.multi_modal_data.mm_items["image"][0]))
            assert ours.keys() == theirs.keys()
            assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
            images += 1
        position += chunk.length
    assert images == len(PICTURES)


def assert_same(datum, reference):
    assert datum.model_input.model_dump() == reference.model_input.model_dump()
    for name in ("target_tokens", "weights"):
        ours, theirs = datum.loss_fn_inputs[name], reference.loss_fn_inputs[name]
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        np.testing.assert_array_equal(ours.to_numpy(), theirs.to_numpy())


def test_a_datum_equals_the_cookbooks(sample):
    whole = to_model_input(sample.token_ids.tolist(), sample.multi_modal_data)
    reference = datum_from_model_input_weights(whole, torch.from_numpy(sample.loss_weights))
    assert_same(to_datum(sample), reference)
    plain = dataclasses.replace(sample, loss_weights=None)
    reference = datum_from_model_input_weights(whole, torch.from_numpy(sample.loss_mask.astype(np.float32)))
    assert_same(to_datum(plain), reference)


def test_a_policy_datum_is_aligned_as_the_cookbooks(sample):
    values = np.random.default_rng(0).normal(size=(2, len(sample))).astype(np.float32)
    rollout = dataclasses.replace(
        sample, loss_weights=None, logprobs=values[0] * sample.loss_mask, advantages=values[1]
    )
    datum = to_datum(rollout)
    whole = to_model_input(sample.token_ids.tolist(), sample.multi_modal_data)
    inputs, targets = create_rightshifted_model_input_and_leftshifted_targets(list(whole.chunks))
    assert datum.model_input.model_dump() == inputs.model_dump()
    found = {name: tensor.to_numpy() for name, tensor in datum.loss_fn_inputs.items()}
    assert found["target_tokens"].tolist() == targets
    np.testing.assert_array_equal(found["logprobs"], rollout.logprobs[1:])
    np.testing.assert_array_equal(found["advantages"], (rollout.advantages * rollout.loss_mask)[1:])
    with pytest.raises(InputError, match="advantages need"):
        to_datum(dataclasses.replace(rollout, logprobs=None))


def test_what_tinker_cannot_take_is_named(sample, renderer):
    stop = sample.media_spans[-1].stop
    names = ("token_ids", "loss_mask", "loss_weights")
    cut = {name: getattr(sample, name)[:stop] for name in names}
    with pytest.raises(InputError, match="must end in text"):
        to_datum(dataclasses.replace(sample, **cut, rendered=None))
    frames = [
        {"role": "user", "content": [{"type": "video", "video": PICTURES[:1] * 4, "times": [0, 1, 2, 3]}]}
    ]
    video = renderer.render(frames)
    with pytest.raises(MediaError, match="encoded image"):
        to_model_input(video.token_ids, video.multi_modal_data)
