"""What travels between processes pickles with protocol 5 and no tensor in the stream."""

import io
import pickle
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from PIL import Image

from kit import assistant, user
from mmrender import Renderer, Trajectory, build_training_sample
from mmrender.testing.tiny_model import build_tiny_model
from mmrender.training import ModelFamily, TensorList, collate


@pytest.fixture(scope="module")
def things(tmp_path_factory):
    """One of each, with an image of 448 by 448."""
    directory = build_tiny_model(tmp_path_factory.mktemp("tiny"), weights=False)
    renderer = Renderer.from_pretrained(directory)
    image = Image.effect_noise((448, 448), 60).convert("RGB")
    ask = user("?", image)
    rendered = renderer.render([ask], add_generation_prompt=True)
    sample = build_training_sample(renderer, [ask, assistant("Noise.")])
    trajectory = Trajectory()
    trajectory.append(
        rendered.token_ids, [3, 4], logprobs=[-1, -2], multi_modal_data=rendered.multi_modal_data
    )
    family = ModelFamily.from_config(directory)
    return {
        "item": rendered.multi_modal_data.mm_items["image"][0],
        "rendering": rendered,
        "sample": sample,
        "trajectory": trajectory,
        "batch": collate([sample], family, pad_token_id=0, dtype=torch.bfloat16),
    }


def dumped(thing):
    buffers = []
    return pickle.dumps(thing, protocol=5, buffer_callback=buffers.append), [one.raw() for one in buffers]


@pytest.mark.parametrize("kind", ["item", "rendering", "sample", "trajectory", "batch"])
def test_pixels_are_no_part_of_the_stream_and_arrive_as_views(things, kind):
    stream, buffers = dumped(things[kind])
    assert len(stream) < 20_000
    assert max(map(len, buffers)) >= 448 * 448 * 3
    writable = [bytearray(buffer) for buffer in buffers]
    bounds = [(np.frombuffer(one, np.uint8).ctypes.data, len(one)) for one in writable]
    _, again = dumped(pickle.loads(stream, buffers=writable))
    for buffer in [buffer for buffer in again if len(buffer) > 4096]:
        address = np.frombuffer(buffer, np.uint8).ctypes.data
        assert any(start <= address and address + len(buffer) <= start + size for start, size in bounds)
    assert [bytes(one) for one in again] == [bytes(one) for one in buffers]


def test_a_batch_over_memory_that_cannot_be_written_to_is_a_copy(things):
    stream, buffers = dumped(things["batch"])
    kept = [bytes(buffer) for buffer in buffers]
    batch = pickle.loads(stream, buffers=kept)
    before = things["batch"].model_inputs()
    for name, value in batch.model_inputs().items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(before[name]))
        assert not hasattr(value, "dtype") or value.dtype == before[name].dtype
    batch.input_ids.fill_(-1)
    assert [bytes(buffer) for buffer in buffers] == kept


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("lengths", [(), (0, 0), (2, 0, 3)])
def test_rows_of_any_dtype_return(dtype, lengths):
    rows = TensorList(
        torch.arange(sum(lengths) * 6).reshape(sum(lengths), 2, 3)[:, :, ::2].to(dtype), lengths
    )
    for protocol in (2, 4, 5):
        back = pickle.loads(pickle.dumps(rows, protocol=protocol))
        assert (back.lengths, back.values.dtype) == (rows.lengths, dtype)
        assert torch.equal(back.values, rows.values)


def test_a_data_loader_passes_tensors_through_shared_memory(things):
    stream = io.BytesIO()
    ForkingPickler(stream).dump(things["batch"])
    assert stream.tell() < 50_000
