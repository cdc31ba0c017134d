"""prime-rl's own code over the facade: from the branches of a rollout to the inputs of its trainer.

prime-rl is not on PyPI: `MMRENDER_PRIME_RL` names a checkout of its repository.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from renderers import CustomRendererConfig, create_renderer

from mmrender import Trajectory
from mmrender.model.weights import load_model
from mmrender.training import ModelFamily, collate, score_tokens

SOURCE = os.environ.get("MMRENDER_PRIME_RL")
pytestmark = pytest.mark.skipif(
    not SOURCE, reason="prime-rl is not on PyPI: name a checkout in MMRENDER_PRIME_RL"
)
IMPORT_PATH = "mmrender.integrations.renderers.MMRenderer"


@pytest.fixture(scope="module")
def prime_rl():
    """The modules of the checkout that turn rollouts into micro-batches."""
    sys.path[:0] = [str(Path(SOURCE) / "src"), str(Path(SOURCE) / "packages/prime-rl-configs/src")]
    from prime_rl.orchestrator import trajectories
    from prime_rl.trainer import batch

    return SimpleNamespace(trace_to_samples=trajectories.trace_to_samples, prepare_batch=batch.prepare_batch)


@pytest.fixture(scope="module")
def facade(tiny_model):
    name = SimpleNamespace(name_or_path=str(tiny_model))
    return create_renderer(name, CustomRendererConfig(import_path=IMPORT_PATH))


@pytest.fixture(scope="module")
def model(tiny_model):
    return load_model(tiny_model, dtype="float32", device="cpu", purpose="a test")


def ask(size, words):
    image = {"type": "image", "image": Image.effect_mandelbrot(size, (-2, -1, 1, 1), 40)}
    return {"role": "user", "content": [image, {"type": "text", "text": words}]}


def rollout(facade, sizes):
    """A rollout of a turn for each picture: as verifiers records it, and as a trajectory of mmrender's."""
    trajectory, nodes, step, prompt, ids, said = Trajectory(), [], None, None, [], []
    stop = facade.get_stop_token_ids()[0]
    for turn, size in enumerate(sizes):
        message = ask(size, f"Which is {turn}?")
        if prompt is None:
            prompt = facade.render([message], add_generation_prompt=True)
        else:
            media = prompt.multi_modal_data
            prompt = facade.bridge_to_next_turn(ids, said, [message], previous_multi_modal_data=media)
        before = sum(len(node.token_ids) for node in nodes)
        said = [*facade.renderer.tokenizer.encode(f"Number {turn}."), stop]
        ids = list(prompt.token_ids)
        logprobs = [-0.5 - 0.01 * index for index in range(len(said))]
        nodes += [node_of(ids[before:], False), node_of(said, True)]
        step = trajectory.append(
            ids, said, logprobs=logprobs, parent=step, multi_modal_data=own_media(facade, sizes[: turn + 1])
        )
    tokens = [*ids, *said]
    sampled = [token for node in nodes for token in node.mask]
    branch = SimpleNamespace(
        nodes=nodes,
        token_ids=tokens,
        logprobs=trajectory.samples()[0].logprobs.tolist(),
        advantages=[1.0 * each for each in sampled],
        multi_modal_data=prompt.multi_modal_data,
        reference_logprobs=None,
        routed_experts=None,
    )
    return SimpleNamespace(branches=[branch]), trajectory.samples()[0]


def node_of(ids, sampled):
    return SimpleNamespace(token_ids=ids, mask=[sampled] * len(ids), sampled=sampled, loss_weights=None)


def own_media(facade, sizes):
    """The pictures of a prompt in mmrender's own form."""
    messages = []
    for turn, size in enumerate(sizes):
        answer = {"role": "assistant", "content": f"Number {turn}."}
        messages += [ask(size, f"Which is {turn}?"), answer]
    return facade.renderer.render(messages[:-1], add_generation_prompt=True).multi_modal_data


def tensors_of(batch):
    """The model's inputs of a micro-batch, as prime-rl's trainer reads them."""
    fields = {
        name: torch.from_numpy(np.frombuffer(bytearray(each.data), each.dtype).reshape(each.shape))
        for name, each in (batch.mm_kwargs or {}).items()
    }
    types = torch.tensor([batch.mm_token_type_ids])
    return {"input_ids": torch.tensor([batch.input_ids]), "mm_token_type_ids": types, **fields}


def samples_of(prime_rl, facade, *traces):
    samples = [
        sample
        for trace in traces
        for sample in prime_rl.trace_to_samples(
            trace, env_name="look", mm_token_type_ids_mapping=facade.mm_token_type_id_map
        )
    ]
    for sample in samples:
        sample.temperatures = [1.0] * len(sample.token_ids)
    return samples


@torch.no_grad()
def test_their_trainer_gets_the_tokens_and_pixels_of_ours(prime_rl, facade, model, tiny_model):
    rollouts = [rollout(facade, sizes) for sizes in ([(96, 64)], [(64, 64), (128, 96)])]
    samples = samples_of(prime_rl, facade, *(trace for trace, _ in rollouts))
    longest = max(len(sample.token_ids) for sample in samples)
    ranks = prime_rl.prepare_batch(samples, seq_len=longest, num_train_workers=1, bin_cost=sum)
    batches = sorted((batch for rank in ranks for batch in rank), key=lambda batch: len(batch.input_ids))
    family = ModelFamily.from_config(tiny_model)
    for batch, (_, ours) in zip(batches, rollouts, strict=True):
        count = len(ours)
        assert batch.input_ids[:count] == ours.token_ids.tolist()
        assert batch.loss_mask[:count] == ours.loss_mask.tolist()
        assert batch.inference_logprobs[:count] == pytest.approx(ours.logprobs.tolist())
        logprobs = model(**tensors_of(batch)).logits[0].log_softmax(-1)
        theirs = logprobs[:-1].gather(-1, torch.tensor(batch.input_ids)[1:, None])[:, 0]
        scored = score_tokens(model, collate([ours], family, pad_token_id=0)).logprobs[0]
        mask = torch.from_numpy(ours.loss_mask.copy())
        torch.testing.assert_close(theirs[: count - 1][mask[1:]], scored[mask], atol=1e-4, rtol=0)


@torch.no_grad()
def test_their_cut_leaves_whole_pictures(prime_rl, facade, model):
    trace, ours = rollout(facade, [(64, 64), (128, 96)])
    second = ours.multi_modal_data.spans()[1]
    (sample,) = samples_of(prime_rl, facade, trace)
    limit = (second.start + second.stop) // 2
    ((batch,),) = prime_rl.prepare_batch([sample], seq_len=limit, num_train_workers=1, bin_cost=sum)
    inputs = tensors_of(batch)
    assert len(inputs["image_grid_thw"]) == 1
    assert batch.input_ids == ours.token_ids[: second.start].tolist()
    assert model(**inputs).logits.isfinite().all()
