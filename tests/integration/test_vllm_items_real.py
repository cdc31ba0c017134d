"""Our items against vLLM's own code, in an environment of its own.

Part of `make integration-vllm`. The layouts were read from vLLM 0.32.
"""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from integration.engine_server import environment_of, needs_tier
from mmrender.client.vllm_fields import LAYOUTS, collate_items
from mmrender.media.vllm_items import (
    BatchedField,
    FieldElem,
    FlatField,
    SharedField,
    decode_mm_kwargs_item,
    encode_mm_kwargs_item,
    join_items,
)
from vllm_cases import batch_of, described, described_item, outputs_of

pytestmark = needs_tier("vllm")

DTYPES = ["bool", "int16", "uint64", "float64", "complex64", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
BATCHES = [
    (layout, architecture, modality)
    for layout in LAYOUTS
    for architecture in layout.architectures
    for modality in sorted({spec.modality for spec in layout.fields.values()})
]


def our_items():
    bits = torch.arange(16, dtype=torch.uint8)
    yield {
        name: FieldElem(bits.view(getattr(torch, name)), BatchedField()) for name in DTYPES if name != "bool"
    }
    yield {
        "flags": FieldElem(np.array([[True], [False]]), BatchedField(keep_on_cpu=True)),
        "big": FieldElem(np.arange(3, dtype=">i4"), SharedField(3)),
        "strided": FieldElem(np.arange(24.0)[::-2], FlatField(((slice(0, 12),), (slice(12, 70000, 2),)))),
        "nested": FieldElem([np.array(3), [1, 2.5, True, -(2**60)], []], BatchedField()),
        "cached": FieldElem(None, FlatField(((slice(None), slice(0, 1)),), dim=1)),
        "empty": FieldElem(np.zeros((0, 3), np.float16), FlatField((slice(0, 0),))),
    }


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """vLLM's answers to all of this file's questions, from one run."""
    python = environment_of("MMRENDER_VLLM_ENV", ".venv-vllm")
    request, answer = (tmp_path_factory.mktemp("vllm") / name for name in ("request.json", "answer.json"))
    batches = []
    for layout, architecture, modality in BATCHES:
        whole = {key: FieldElem(value, BatchedField()) for key, value in batch_of(layout, modality).items()}
        batches.append([architecture, encode_mm_kwargs_item(whole)])
    request.write_text(
        json.dumps({"read": [encode_mm_kwargs_item(item) for item in our_items()], "split": batches})
    )
    script = Path(__file__).with_name("vllm_oracle.py")
    run = subprocess.run(
        [str(python), str(script), str(request), str(answer)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(answer.read_text())


def test_vllm_reads_our_items_and_writes_them_alike(oracle):
    for item, answer in zip(our_items(), oracle["read"], strict=True):
        text = encode_mm_kwargs_item(item)
        assert answer["item"] == described_item(decode_mm_kwargs_item(text))
        assert answer["text"] == text


@pytest.mark.parametrize("number", range(len(BATCHES)), ids=[f"{a}-{m}" for _, a, m in BATCHES])
def test_layouts_cut_and_join_batches_as_vllm_does(oracle, number):
    layout, _, modality = BATCHES[number]
    answer = oracle["split"][number]
    ours = {modality: collate_items(layout, outputs_of(layout, modality), spatial_merge_size=2)}
    theirs = {
        key: [described_item(decode_mm_kwargs_item(text)) for text in texts]
        for key, texts in answer["items"].items()
    }
    assert {key: [described_item(item) for item in items] for key, items in ours.items()} == theirs
    joined = join_items([decode_mm_kwargs_item(text) for text in answer["items"][modality]])
    assert {key: described(value) for key, value in joined.items()} == answer["joined"]
