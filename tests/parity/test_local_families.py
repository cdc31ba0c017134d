"""Logprobs of `LocalBackend` equal those of one plain forward, for each family of Transformers, sequences mixed."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mmrender.client.local import LocalBackend
from mmrender.client.types import EngineRequest
from mmrender.training import collate
from training_models import FAMILIES, IMAGE_ID, PAD_ID, VIDEO_ID, make_samples, tiny_family


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processors")


@pytest.mark.parametrize("name", FAMILIES)
def test_logprobs_equal_a_plain_forward(name: str, folder: Path) -> None:
    tiny = tiny_family(name, folder)
    backend = LocalBackend(tiny.model)
    samples = make_samples(tiny, (1, 0, 2))
    # A twin of each, whose text differs, shares its forward; and each is asked for twice.
    twins = [replace(one, token_ids=np.append(one.token_ids[:-1], np.int32(7))) for one in samples]
    samples = [*samples, *twins] * 2
    # A media token that is sampled would be an image to the plain forward.
    sampling = {"max_tokens": 6, "ignore_eos": True, "logit_bias": {IMAGE_ID: -100.0, VIDEO_ID: -100.0}}

    shapes = []

    def counted(_, __, named):
        shapes.append(named["input_ids"].shape)
        for _ in range(
            3000
        ):  # until all have come, so that they share forwards from the first or the second step on
            if len(backend._running) == len(samples):
                break
            time.sleep(0.01)

    async def together():
        return await asyncio.gather(
            *[
                backend.generate(
                    EngineRequest(
                        name,
                        sample.token_ids.tolist(),
                        {**sampling, "seed": index},
                        f"{sample.sample_id}-{index}",
                        sample.multi_modal_data,
                    )
                )
                for index, sample in enumerate(samples)
            ]
        )

    handle = tiny.model.register_forward_pre_hook(counted, with_kwargs=True)
    responses = asyncio.run(together())
    handle.remove()
    lengths = {len(sample) for sample in samples}
    assert len(lengths) == 3
    # Sequences of all lengths share the forwards of their five further tokens.
    assert sum(shape[1] == 1 for shape in shapes) in (5, 6)
    assert max(shape[0] for shape in shapes) == len(samples)
    for sample, response in zip(samples, responses, strict=True):
        count = len(response.completion_ids)
        whole = replace(
            sample,
            token_ids=np.concatenate([sample.token_ids, np.array(response.completion_ids, np.int32)]),
            loss_mask=np.pad(sample.loss_mask, (0, count)),
            logprobs=np.pad(sample.logprobs, (0, count)),
        )
        inputs = collate([whole], tiny.family, pad_token_id=PAD_ID).model_inputs()
        # The model itself numbers positions and masks.
        del inputs["position_ids"], inputs["attention_mask"]
        with torch.no_grad():
            logprobs = tiny.model(**inputs).logits[0].float().log_softmax(-1)
        rows = logprobs[len(sample) - 1 : -1]
        assert rows.std() > 0.5
        plain = rows[range(count), response.completion_ids]
        assert response.logprobs == pytest.approx(plain.tolist(), abs=1e-4)
