"""Families that batches are not known to serve are proved, or refused with the layout that fails.

`python tools/prove_families.py MODEL_TYPE...` prints the table of lengths and differences of any family.
"""

import copy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from kit import error_of, raised
from mmrender.caching import release_of
from mmrender.errors import BatchError
from mmrender.testing import families as families_of_testing
from mmrender.testing.families import compare_family, prove_family
from mmrender.testing.family_samples import make_samples
from mmrender.testing.small_architecture import build_small
from mmrender.training import ModelFamily, collate, families
from mmrender.training.collate import usable
from mmrender.trajectory.sample import TrainingSample
from training_cases import sample, tiled_item


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


def long_rope() -> Any:
    factors = {"short_factor": [1.0] * 48, "long_factor": [16.0] * 48}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    return CONFIG_MAPPING["phi3"](
        rope_parameters=rope, original_max_position_embeddings=4096, max_position_embeddings=131072
    )


SPLITS = {"ring", "ulysses"}
WINDOW, LONGEST = "sliding_window", "max_position_embeddings"
TYPES = "mm_token_type_ids"
COMPARED: dict[str, tuple[Any, Any, set[str]]] = {
    "qwen3_5": (lambda: config("qwen3_5"), (TYPES, "linear_attn", set()), {LONGEST}),
    "gemma3": (lambda: config("gemma3"), ("token_type_ids", "", {"ring"}), {WINDOW, LONGEST}),
    "paligemma": (lambda: config("paligemma"), ("token_type_ids", "", {"packed", *SPLITS}), {LONGEST}),
    "idefics3": (lambda: config("idefics3"), (None, "", set()), {LONGEST}),
    # It scales attention by the place in the row, where it should take the place in the sample.
    "llama4": (
        CONFIG_MAPPING["llama4_text"],
        (None, "", {"left", "packed"}),
        {"attention_chunk_size", "floor_scale", LONGEST},
    ),
    "phi3": (long_rope, (None, "", set()), {"original_max_position_embeddings", LONGEST}),
    # Text and vision tower have recurrent layers.
    "lfm3_vl": (lambda: config("lfm3_vl", **CONVOLUTIONS), (None, "conv", set()), {LONGEST}),
}
"""Each kind of finding: token types, recurrent modules, refused layouts and splits, and lengths that are crossed."""


@pytest.mark.parametrize("name", list(COMPARED))
def test_batches_equal_single_forwards_on_both_sides_of_each_length(name: str) -> None:
    """Logits and gradients, or the layout is refused; what a family needs is found."""
    build, expected, lengths = COMPARED[name]
    given = build()
    report = compare_family(given)
    family = report.family
    assert (family.token_types, family.recurrent, set(family.refused)) == expected
    assert lengths <= {one.path.rpartition(".")[2] for one in report.lengths}
    for layout in {"right", "left", "packed"} - set(family.refused):
        assert report.logits[layout] <= 5e-5
        assert report.gradients[layout] <= 5e-5
    assert family.max_sample_tokens == (4096 if name == "phi3" else None)


def test_samples_lie_on_both_sides_of_each_length() -> None:
    """Lengths are found in the configuration and become short in the small architecture, in their order."""
    small = build_small(config("gemma3"))
    text = small.model.config.text_config
    assert {one.path: one.small for one in small.lengths} == {
        "text_config.sliding_window": text.sliding_window,
        "text_config.max_position_embeddings": text.max_position_embeddings,
    }
    assert text.sliding_window < text.max_position_embeddings < 120
    family = ModelFamily.from_config(small.model.config)
    lengths = sorted({one.small for one in small.lengths})
    counts = [len(one) for one in make_samples(family, [tiled_item((1, 3, 6, 6), 4)] * 4, lengths)]
    for length in lengths:
        assert {length, length + 3} <= set(counts)
    assert min(counts) < lengths[0] < 2 * lengths[-1] < max(counts)


def test_a_rotary_embedding_that_follows_the_longest_sample_is_found_without_its_name() -> None:
    small = build_small(long_rope())
    report = families_of_testing._compared(small.model, small.lengths, None, gradients=True)
    assert report.family.max_sample_tokens == 4096
    assert not report.family.refused


def test_a_length_that_cannot_be_crossed_bounds_samples() -> None:
    model = own_model()

    class Own(type(model)):
        def __init__(self, config: Any, needed: Any) -> None: ...

    model.config.max_position_embeddings = 4096
    assert prove_family(model).max_sample_tokens is None  # a small model of its class crosses it
    model.__class__ = Own
    assert prove_family(model).max_sample_tokens == 4096


def test_a_refused_layout_is_named_with_the_module_at_fault() -> None:
    given = config("paligemma")
    found = prove_family(given)
    assert ModelFamily.from_config(given).refused.keys() == found.refused.keys()
    assert found.refused["packed"].startswith(
        "packed rows differ from single forwards in model.language_model.layers.0.self_attn (GemmaAttention), by "
    )
    family = ModelFamily.from_config({"model_type": "paligemma", "image_token_id": 90})
    assert error_of(BatchError, collate, [sample()], family, pad_token_id=0, rows=[[0]]) == (
        "layout: paligemma takes no packed rows - expected right or left, "
        "got packed prompts see each other, since prompts are seen in both directions"
    )


class Mixing(torch.nn.Module):
    """What no family has: each token takes something of the whole row."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + hidden_states.mean(1, keepdim=True)


def own_model() -> Any:
    return build_small(CONFIG_MAPPING["qwen2"](num_hidden_layers=2)).model


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
    found = prove_family(model)
    assert found.recurrent == "input_layernorm|post_attention_layernorm"
    assert not found.refused


def test_a_model_of_the_callers_is_left_as_it_was() -> None:
    model = own_model().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert not prove_family(model).refused
    assert not model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_what_is_refused_in_every_layout_is_an_error() -> None:
    model = own_model()
    model.model.norm = torch.nn.Sequential(model.model.norm, Mixing())
    with pytest.raises(BatchError, match="batches for qwen2 differ from single forwards in every layout"):
        prove_family(model)


def test_a_comparison_that_could_not_fail_proves_nothing() -> None:
    model = own_model()
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    with pytest.raises(BatchError, match="nothing is proved: another token does not change"):
        prove_family(model)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mllama", "its cross-attention mask says for each token which images it sees"),
        ("blip", "does not name the token of images"),
    ],
)
def test_inputs_that_batches_do_not_hold_are_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        prove_family(CONFIG_MAPPING[name]())


def test_a_forward_that_takes_more_than_batches_hold_is_refused() -> None:
    model = own_model()

    class Asking(type(model)):
        def forward(self, input_ids: Any = None, bbox: Any = None, **others: Any) -> Any:
            return super().forward(input_ids=input_ids, **others)

    model.__class__ = Asking
    assert error_of(BatchError, prove_family, model) == (
        "Asking.forward: the model takes bbox, which batches do not hold. "
        "Train on one sample at a time with the inputs of the model's own processor"
    )


def test_a_proof_is_kept_between_processes_and_damage_means_not_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMRENDER_CACHE", str(tmp_path / "cache"))
    given = recurrent_text()
    given.save_pretrained(tmp_path / "model")
    proved = prove_family(given)
    (file,) = (tmp_path / "cache" / "proofs").iterdir()
    script = "import sys; from mmrender.training import ModelFamily as F; print(F.from_config(sys.argv[1]).recurrent)"
    command = [sys.executable, "-c", script, str(tmp_path / "model")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "conv\n"

    def known() -> bool:
        families._proofs.clear()
        try:
            return ModelFamily.from_config(given) == proved
        except BatchError:
            return False

    assert known()
    content = file.read_bytes()
    for place in range(0, len(content), 7):
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert not known(), place
    file.write_bytes(content)
    for release in ("transformers", "torch"):
        with monkeypatch.context() as patch:
            patch.setattr(
                families, "release_of", lambda name, one=release: "0" if name == one else release_of(name)
            )
            assert not known()
    with monkeypatch.context() as patch:
        patch.setattr(families, "digest_of_code", lambda _: "other code")
        assert not known()
    assert known()


TRAINED = {"original_max_position_embeddings": 64}
ROTARY: dict[str, tuple[dict[str, Any], bool]] = {
    "default": ({}, False),
    "linear": ({"factor": 4.0}, False),
    "yarn": ({"factor": 4.0, **TRAINED}, False),
    "llama3": ({"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **TRAINED}, False),
    "dynamic": ({"factor": 4.0}, True),
    "longrope": ({"factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [16.0] * 8, **TRAINED}, True),
}
"""Rotary embeddings, and whether they follow the longest sample of a batch beyond 64 tokens."""


def rotary_model(kind: str, model_type: str = "llama") -> Any:
    parameters = {"rope_type": kind, "rope_theta": 100.0, **ROTARY[kind][0]}
    given = CONFIG_MAPPING[model_type](
        rope_parameters=parameters,
        max_position_embeddings=64 if kind == "dynamic" else 256,
        vocab_size=512,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        original_max_position_embeddings=64,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(given, dtype=torch.float32, attn_implementation="eager")
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, parameter[0].numel() ** -0.5)
    return model


def text_sample(length: int) -> TrainingSample:
    ids = np.random.default_rng(length).integers(1, 500, length).astype(np.int32)
    return TrainingSample(ids, np.arange(length) > 0, sample_id=f"{length} tokens")


def largest_difference(model: Any, family: ModelFamily, lengths: list[int], **layout: Any) -> float:
    """Between logits in one batch and each sample's own, which come from a model that ran no other."""
    samples = [text_sample(length) for length in lengths]
    with torch.no_grad():
        batch = collate(samples, family, pad_token_id=0, **layout)
        together = batch.split(copy.deepcopy(model)(**batch.model_inputs()).logits)
        alone = [
            copy.deepcopy(model)(input_ids=torch.from_numpy(one.token_ids.astype(np.int64))[None]).logits[0]
            for one in samples
        ]
    return max(float((one - own).abs().max()) for one, own in zip(together, alone, strict=True))


LAYOUTS: list[dict[str, Any]] = [{}, {"padding_side": "left"}, {"rows": [[0, 1, 2]]}]


@pytest.mark.parametrize("kind", list(ROTARY))
def test_rotary_embeddings_that_follow_the_longest_sample_bound_it(kind: str) -> None:
    """The samples that are refused do get other logits together; up to the bound they do not, in any layout."""
    model = rotary_model(kind)
    family = prove_family(model)
    assert family.max_sample_tokens == (64 if ROTARY[kind][1] else None)
    assert ModelFamily.from_config(model.config).max_sample_tokens == family.max_sample_tokens
    unbounded = replace(family, max_sample_tokens=None)
    apart = [largest_difference(model, unbounded, [20, 150, 64], **layout) for layout in LAYOUTS]
    if not ROTARY[kind][1]:
        assert max(apart) < 1e-4
        return
    assert min(apart) > 0.3
    samples = [text_sample(length) for length in (20, 65, 64)]
    for layout in LAYOUTS:
        assert largest_difference(model, family, [20, 50, 64], **layout) < 1e-4
        error = raised(BatchError, collate, samples, family, pad_token_id=0, **layout)
        assert (error.where, error.expected, error.got) == ("65 tokens", "at most 64 tokens", "65")
    kept, left_out = usable(samples, family)
    assert kept == [samples[0], samples[2]]
    assert list(left_out) == ["65 tokens"]


LONG = {"rope_type": "longrope", "original_max_position_embeddings": 128}
LAYERS = {"sliding_attention": {"rope_type": "default"}, "full_attention": LONG}
SU = {"type": "su", "long_factor": [2.0]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 512}, 512),
        ({"rope_scaling": SU, "original_max_position_embeddings": 99}, 99),
        ({"rope_parameters": LAYERS, "max_position_embeddings": 512}, 128),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 128}}, None),
        ({"rope_scaling": None}, None),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_rotary_embeddings_are_read_wherever_they_are(
    text: dict[str, Any], expected: int | None, nested: bool
) -> None:
    inner = {"llm_config": {"deeper": text}} if nested else {"text_config": text}
    family = ModelFamily.from_config({"model_type": "llava", "image_token_id": 90, **inner})
    assert family.max_sample_tokens == expected


def test_a_rotary_embedding_without_its_bound_is_refused() -> None:
    text = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    given = {"model_type": "llava", "image_token_id": 90, "text_config": text}
    assert error_of(BatchError, ModelFamily.from_config, given) == (
        "config.text_config.rope_scaling: the rotary embedding follows the longest sample of a batch from an "
        "unknown length on - expected original_max_position_embeddings or max_position_embeddings, got "
        "'dynamic'. Pass the configuration as Transformers reads it, which has all defaults"
    )


def test_phi3_in_llava_is_bounded() -> None:
    text = rotary_model("longrope", "phi3").config
    text.rope_parameters["original_max_position_embeddings"] = text.original_max_position_embeddings = 200
    given = CONFIG_MAPPING["llava"](text_config=text, vision_config=CONFIG_MAPPING["clip_vision_model"]())
    assert prove_family(given).max_sample_tokens == 200


def test_text_that_sees_itself_in_both_directions_is_not_packed() -> None:
    given = config("gemma3", use_bidirectional_attention=True, sliding_window=1024)
    assert ModelFamily.from_config(given).refused.keys() == {"packed", "ring", "ulysses"}
    proved = prove_family(given)
    assert proved.refused.keys() == {"packed", "ring", "ulysses"}
    assert proved.refused["packed"].startswith("packed rows differ from single forwards in ")
