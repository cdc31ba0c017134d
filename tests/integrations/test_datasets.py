"""`datasets`, a `DataLoader` that spawns its workers, and the `openai` client at the endpoint."""

import json
import os
import shutil
import subprocess
import sys

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from mmrender import Renderer, build_training_sample
from mmrender.integrations.datasets import RenderRow
from mmrender.training import Collator, ModelFamily

HASH = "import sys; from datasets.fingerprint import Hasher; from mmrender.integrations.datasets import RenderRow; "
HASH += "print(Hasher.hash(RenderRow(sys.argv[1])))"


def rows(count):
    made = []
    for index in range(count):
        pixels = np.random.default_rng(index).integers(0, 255, (64, 96, 3), np.uint8)
        messages = [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": f"{index}?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": f"Answer {index}."}]},
        ]
        made.append({"messages": json.dumps(messages), "images": [Image.fromarray(pixels)]})
    return made


def conversation(row):
    return {"messages": json.loads(row["messages"]), "images": row["images"]}


@pytest.fixture(scope="module")
def stored():
    made = rows(6)
    features = datasets.Features({"messages": datasets.Value("string"), "images": [datasets.Image()]})
    return made, datasets.Dataset.from_list(made, features=features).map(
        lambda row: {"messages": json.loads(row["messages"])}, features=None
    )


def test_rows_with_image_columns_map_to_what_the_renderer_gives(stored, tiny_model):
    made, data = stored
    mapped = data.map(RenderRow(tiny_model), remove_columns=data.column_names)
    renderer = Renderer.from_pretrained(tiny_model)
    for row, found in zip(made, mapped, strict=True):
        sample = build_training_sample(renderer, json.loads(row["messages"]), images=row["images"])
        assert found["input_ids"] == sample.token_ids.tolist()
        assert found["labels"] == sample.labels().tolist()
        assert found["image_hashes"] == list(sample.multi_modal_data.mm_hashes["image"])


def test_the_fingerprint_is_the_models_in_every_process_and_no_other(tiny_model, tmp_path):
    def fingerprint(model, seed):
        command = [sys.executable, "-c", HASH, str(model)]
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        return done.stdout.strip()

    here = datasets.fingerprint.Hasher.hash(RenderRow(tiny_model))
    assert fingerprint(tiny_model, 1) == fingerprint(tiny_model, 2) == here
    used = RenderRow(tiny_model)
    used({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]})
    assert datasets.fingerprint.Hasher.hash(used) == here
    assert datasets.fingerprint.Hasher.hash(RenderRow(tiny_model, final_stop=False)) != here
    changed = tmp_path / "changed"
    shutil.copytree(tiny_model, changed)
    before = RenderRow(changed).digest
    template = changed / "chat_template.jinja"
    template.write_text(template.read_text() + "{# changed #}")
    assert RenderRow(changed).digest != before


def test_mapping_again_is_read_from_the_cache(stored, tiny_model):
    _, data = stored
    first = data.map(RenderRow(tiny_model), remove_columns=data.column_names)
    assert (
        data.map(RenderRow(tiny_model), remove_columns=data.column_names)._fingerprint == first._fingerprint
    )


@pytest.mark.filterwarnings("ignore")
def test_a_data_loader_that_spawns_its_workers_gives_the_batches_of_this_process(stored, tiny_model):
    made, _ = stored
    examples = [conversation(row) for row in made]
    collator = Collator(ModelFamily.from_config(tiny_model), 0, Renderer.from_pretrained(tiny_model))
    loader = torch.utils.data.DataLoader(
        examples, batch_size=3, collate_fn=collator, num_workers=1, multiprocessing_context="spawn"
    )
    for start, found in zip((0, 3), loader, strict=True):
        expected = collator(examples[start : start + 3])
        assert set(found) == set(expected)
        for name, value in expected.items():
            assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name
