"""Families that batches are not known to serve are proved, or refused with the layout that fails."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from mmrender.errors import BatchError
from mmrender.training import ModelFamily, collate, families
from mmrender.training.tiny import build_tiny
from training_cases import sample


def config(name: str, **text: Any) -> Any:
    given = CONFIG_MAPPING[name]()
    settings = given.to_dict()
    settings["vision_config"] = (
        settings.get("vision_config") or type(given).sub_configs["vision_config"]().to_dict()
    )
    settings["text_config"] = {**settings["text_config"], **text}
    return type(given).from_dict(settings)


CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 4, "num_hidden_layers": 8}


def recurrent_text() -> Any:
    return CONFIG_MAPPING["lfm2"](num_hidden_layers=2, layer_types=["conv", "full_attention"])


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: config("qwen3_vl"), ("mm_token_type_ids", "", set())),
        (lambda: config("gemma3"), ("token_type_ids", "", {"ring"})),
        (lambda: config("gemma4", use_bidirectional_attention="vision"), ("mm_token_type_ids", "", {"ring"})),
        (lambda: config("paligemma"), ("token_type_ids", "", {"packed", "ring", "ulysses"})),
        (recurrent_text, (None, "conv", set())),
        (
            lambda: config("lfm3_vl", **CONVOLUTIONS),
            (None, "conv", set()),
        ),  # the vision tower has such layers, too
    ],
    ids=["qwen3_vl", "gemma3", "gemma4", "paligemma", "lfm2", "lfm3_vl"],
)
def test_what_a_family_needs_is_found_and_what_fails_is_refused(build: Any, expected: Any) -> None:
    given = build()
    found = ModelFamily.prove(given)
    assert (found.token_types, found.recurrent, set(found.refused)) == expected
    assert ModelFamily.from_config(given).refused.keys() == found.refused.keys()


def test_a_refused_layout_is_named_with_the_module_at_fault() -> None:
    found = ModelFamily.prove(config("paligemma"))
    assert found.refused["packed"].startswith(
        "packed rows part from single forwards in model.language_model.layers.0.self_attn (GemmaAttention), by "
    )
    family = ModelFamily.from_config({"model_type": "paligemma", "image_token_id": 90})
    with pytest.raises(BatchError) as caught:
        collate([sample()], family, pad_token_id=0, rows=[[0]])
    assert str(caught.value) == (
        "layout: paligemma takes no packed rows - expected right or left, "
        "got packed prompts see each other, since prompts are seen in both directions"
    )


class Mixing(torch.nn.Module):
    """What no family has: each token takes something of the whole row."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + hidden_states.mean(1, keepdim=True)


def own_model() -> Any:
    return build_tiny(CONFIG_MAPPING["qwen2"](num_hidden_layers=2))


class Convolved(torch.nn.Module):
    """A short convolution: each token takes something of the one before."""

    def __init__(self, before: torch.nn.Module) -> None:
        super().__init__()
        self.before = before

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        made = self.before(hidden_states)
        return made + torch.nn.functional.pad(made, (0, 0, 1, 0))[:, :-1]


def test_several_modules_of_a_layer_that_mix_samples_are_found() -> None:
    model = own_model()
    for layer in model.model.layers:
        layer.input_layernorm = Convolved(layer.input_layernorm)
        layer.post_attention_layernorm = Convolved(layer.post_attention_layernorm)
    found = ModelFamily.prove(model)
    assert found.recurrent == "input_layernorm|post_attention_layernorm"
    assert {"right", "packed"} & found.refused.keys() == set()
    assert "left" in found.refused  # padding before a sample is a token before it


def test_a_model_of_the_callers_is_left_as_it_was() -> None:
    model = own_model().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert not ModelFamily.prove(model).refused
    assert not model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


class Following(torch.nn.Module):
    """What only rows with padding at their ends allow: each token takes something of the one before it."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + torch.nn.functional.pad(hidden_states, (0, 0, 1, 0))[:, :-1]


def test_a_split_of_rows_that_differs_is_refused_with_the_module_at_fault() -> None:
    model = own_model()
    model.model.norm = torch.nn.Sequential(model.model.norm, Following())
    refused = ModelFamily.prove(model).refused
    assert refused.keys() == {"left", "packed", "ring", "ulysses"}
    for split in ("ring", "ulysses"):
        assert refused[split].startswith(
            f"{split} rows part from single forwards in model.norm.1 (Following), by "
        )


def test_what_is_refused_in_every_layout_is_an_error() -> None:
    model = own_model()
    model.model.norm = torch.nn.Sequential(model.model.norm, Mixing())
    with pytest.raises(BatchError, match="batches for qwen2 differ from single forwards in every layout"):
        ModelFamily.prove(model)


def test_a_comparison_that_could_not_fail_proves_nothing() -> None:
    model = own_model()
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    with pytest.raises(BatchError, match="nothing is proved: another token does not change"):
        ModelFamily.prove(model)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mllama", "its cross-attention mask says for each token which images it sees"),
        ("blip", "does not name the token of images"),
    ],
)
def test_inputs_that_batches_do_not_hold_are_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        ModelFamily.prove(CONFIG_MAPPING[name]())


def test_a_forward_that_takes_more_than_batches_hold_is_refused() -> None:
    model = own_model()

    class Asking(type(model)):
        def forward(self, input_ids: Any = None, bbox: Any = None, **others: Any) -> Any:
            return super().forward(input_ids=input_ids, **others)

    model.__class__ = Asking
    with pytest.raises(BatchError) as caught:
        ModelFamily.prove(model)
    assert str(caught.value) == (
        "Asking.forward: the model takes bbox, which batches do not hold. "
        "Train on one sample at a time with the inputs of the model's own processor"
    )


def test_a_proof_is_kept_between_processes_and_damage_means_not_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMRENDER_CACHE", str(tmp_path / "cache"))
    given = recurrent_text()
    given.save_pretrained(tmp_path / "model")
    proved = ModelFamily.prove(given)
    (file,) = (tmp_path / "cache" / "proofs").iterdir()
    script = "import sys; from mmrender.training import ModelFamily as F; print(F.from_config(sys.argv[1]).recurrent)"
    command = [sys.executable, "-c", script, str(tmp_path / "model")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "conv\n"

    def known() -> bool:
        families._remembered.clear()
        try:
            return ModelFamily.from_config(given) == proved
        except BatchError:
            return False

    assert known()
    content = file.read_bytes()
    for place in range(len(content)):
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert not known(), place
    file.write_bytes(content)
    for release in ("transformers", "torch"):
        with monkeypatch.context() as patch:
            patch.setattr(
                families, "version", lambda name, one=release: "0" if name == one else version(name)
            )
            assert not known()
    with monkeypatch.context() as patch:
        patch.setattr(families, "digest_of_code", lambda _: "other code")
        assert not known()
    assert known()
