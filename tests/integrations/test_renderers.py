"""mmrender behind the interface of `renderers`, against the package itself and under verifiers' pool."""

import dataclasses
import os
import subprocess
import sys
import tarfile
from collections import defaultdict
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

import pytest
import renderers
from PIL import Image
from renderers import CustomRendererConfig, create_renderer

import mmrender
from integrations.recipe_cases import run_recipe
from integrations.renderers_through_facade import hub_cache
from mmrender.errors import InputError, RenderError
from mmrender.integrations.renderers import _STATUSES, MMRenderer
from mmrender.parsing.calls import CallStatus

IMPORT_PATH = "mmrender.integrations.renderers.MMRenderer"
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look closer.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    },
}


PICTURES = ((64, 40), (224, 224), (30, 130))


class Named:
    """All that is read of a tokenizer."""

    def __init__(self, name_or_path):
        self.name_or_path = str(name_or_path)


def picture(index):
    return {"type": "image", "image": Image.new("RGB", PICTURES[index], (9 * index, 99, 199))}


def conversation(turns):
    """Turns of a user's picture, a call and its result; the last one is the user's."""
    messages = [{"role": "system", "content": "Be brief."}]
    for turn in range(turns):
        ask = {"type": "text", "text": f"Which is picture {turn}? <|image_pad|>"}
        messages.append({"role": "user", "content": [picture(turn), ask]})
        if turn + 1 < turns:
            messages.append({"role": "assistant", "content": f"A plain one, number {turn}."})
    return messages


@pytest.fixture(scope="module")
def facade(tiny_model):
    return create_renderer(Named(tiny_model), CustomRendererConfig(import_path=IMPORT_PATH))


def test_it_is_a_renderer_of_theirs(facade):
    assert isinstance(facade, renderers.Renderer)
    assert isinstance(facade, renderers.MultimodalRenderer)
    assert renderers.is_multimodal(facade)
    assert facade.mm_token_type_id_map == {
        facade.renderer.tokenizer.token_id("<|image_pad|>"): 1,
        facade.renderer.tokenizer.token_id("<|video_pad|>"): 2,
    }


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_every_field_is_ours_in_their_types(facade, turns):
    messages = conversation(turns)
    ours = facade.renderer.render(messages, tools=[TOOL])
    theirs = facade.render(messages, tools=[TOOL])
    names = [field.name for field in dataclasses.fields(theirs)]
    assert {type(getattr(theirs, name)) for name in names} == {list, renderers.MultiModalData}
    assert theirs.token_ids == ours.token_ids
    assert theirs.message_roles == [message["role"] for message in messages]
    assert theirs.tokens_per_message() == ours.tokens_per_message
    for name in ("message_indices", "sampled_mask", "is_content"):
        assert getattr(theirs, name) == getattr(ours, name).tolist(), name
    for item, given in zip(
        ours.multi_modal_data.mm_items["image"], theirs.multi_modal_data.mm_items["image"], strict=True
    ):
        for name, tensor in item.tensors().items():
            assert (given[name].numpy() == tensor).all()


@pytest.mark.parametrize("process_multimodal", [True, False])
def test_bridges_extend_what_a_full_rendering_gives(facade, process_multimodal):
    option = {"process_multimodal": process_multimodal}
    messages = conversation(3)
    prompt = facade.render(messages[:2], add_generation_prompt=True, **option)
    for length in (4, 6):
        said = facade.renderer.tokenizer.encode(messages[length - 2]["content"])
        bridged = facade.bridge_to_next_turn(
            prompt.token_ids,
            [*said, facade.get_stop_token_ids()[0]],
            messages[length - 1 : length],
            previous_multi_modal_data=prompt.multi_modal_data,
            **option,
        )
        full = facade.render(messages[:length], add_generation_prompt=True, **option)
        assert bridged.token_ids == full.token_ids
        assert not any(bridged.sampled_mask)
        assert not any(bridged.is_content[: len(prompt.token_ids)])
        if process_multimodal:
            assert bridged.multi_modal_data.mm_hashes == full.multi_modal_data.mm_hashes
            assert bridged.multi_modal_data.mm_placeholders == full.multi_modal_data.mm_placeholders
        else:
            assert bridged.multi_modal_data is None
        prompt = bridged


def test_unprocessed_ids_are_the_collapsed_ones_and_load_nothing(facade, tmp_path):
    messages = conversation(2)
    ids = facade.render_ids(messages, process_multimodal=False)
    assert ids == facade.renderer.render(messages).collapsed_ids
    messages[1]["content"][0] = {"type": "image_url", "image_url": {"url": "https://nowhere.invalid/a.png"}}
    assert facade.render_ids(messages, process_multimodal=False) == ids


def test_each_status_is_theirs(facade):
    assert set(_STATUSES) == set(get_args(CallStatus))
    said = 'Look.\n<tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call>\n<tool_call>\n{"name": '
    ids = facade.renderer.tokenizer.encode(said)
    parsed = facade.parse_response([*ids, facade.get_stop_token_ids()[0]], tools=[TOOL])
    assert parsed.content == "Look."
    assert [call.status.value for call in parsed.tool_calls] == ["ok", "unclosed_block"]
    assert parsed.tool_calls[0].arguments == {"x": 1}
    assert all(call.token_span[1] <= len(ids) for call in parsed.tool_calls)


@pytest.mark.parametrize("roles", [None, {"user"}])
@pytest.mark.parametrize("chosen", [[1] * 5, [0, 0, 0, 1, 1]])
def test_their_training_samples_train_on_what_ours_do(facade, roles, chosen):
    messages = [*conversation(2), {"role": "assistant", "content": "Another."}]
    chosen = [*chosen, 1][: len(messages)]
    sample = renderers.build_training_sample(
        facade, messages, content_sft_roles=roles, ensure_final_stop=True, message_loss_mask=chosen
    )
    ours = mmrender.build_training_sample(
        facade.renderer,
        messages,
        train_on={"assistant", *(roles or ())},
        select=[index for index, keep in enumerate(chosen) if keep],
    )
    images = ours.multi_modal_data.spans(len(ours.token_ids))
    mask = ours.loss_mask.copy()
    if roles:  # theirs trains on the pads of a chosen user's image, which nobody samples
        for span in images:
            mask[span.start : span.stop] = bool(chosen[ours.rendered.message_indices[span.start]])
    assert sample.token_ids == ours.token_ids.tolist()
    assert sample.loss_mask == mask.tolist()
    assert sum(sample.mm_token_type_ids) == sum(span.stop - span.start for span in images)


@pytest.mark.parametrize(
    ("model", "options"),
    [("qwen3_5", {}), ("qwen3_5", {"enable_thinking": False}), ("qwen3_vl_thinking", {})],
)
def test_models_that_reason_are_trained_on_answers_and_never_on_nothing(shared_models, model, options):
    config = CustomRendererConfig(import_path=IMPORT_PATH, **options)
    facade = create_renderer(Named(shared_models / model), config)
    ask = {"role": "user", "content": "Which?"}
    messages = [ask, {"role": "assistant", "content": "A cow."}] * 3
    sample = renderers.build_training_sample(facade, messages)
    kept = [token for token, is_trained in zip(sample.token_ids, sample.loss_mask, strict=True) if is_trained]
    assert facade.renderer.decode(kept) == "A cow.<|im_end|>" * 3
    dropped = [ask, {"role": "assistant", "content": "A cow.", "reasoning_content": "It moos."}, ask]
    with pytest.raises(RenderError, match=r"^messages\[1\]: no turn of this conversation is one"):
        renderers.build_training_sample(facade, dropped)
    assert facade.render(dropped, add_generation_prompt=True).token_ids  # a prompt needs none


def test_template_variables_are_the_templates_own(facade, tiny_model):
    config = CustomRendererConfig(import_path=IMPORT_PATH, add_vision_id=True)
    numbered = create_renderer(Named(tiny_model), config)
    assert numbered.renderer is facade.renderer
    messages = conversation(1)
    assert numbered.render_ids(messages) == facade.renderer.render_ids(messages, add_vision_id=True)
    wrong = create_renderer(
        Named(tiny_model), CustomRendererConfig(import_path=IMPORT_PATH, add_vision_ids=1)
    )
    with pytest.raises(InputError, match="Did you mean 'add_vision_id'"):
        wrong.render(messages)


async def test_verifiers_pool_grows_by_renderers_that_share_one_model(tiny_model):
    from verifiers.v1.clients.train import ElasticRendererPool

    pool = ElasticRendererPool(str(tiny_model), CustomRendererConfig(import_path=IMPORT_PATH), multiplex=1)
    async with pool.acquire() as first, pool.acquire() as second:
        assert isinstance(first.renderer, MMRenderer)
        assert first.renderer.renderer is second.renderer.renderer
        prompt = await first.run(lambda: first.renderer.render(conversation(1), process_multimodal=False))
    assert prompt.multi_modal_data is None


def test_the_recipe_of_prime_rl_answers(monkeypatch, capsys, tmp_path):
    lines = run_recipe("prime_rl", monkeypatch, capsys, tmp_path)
    assert len([line for line in lines if "tokens in" in line]) == 4


HERE = Path(__file__).parent
FILES = [
    *("multimodal", "bridge", "sampled_mask", "is_content", "message_indices", "message_tool_names"),
    *("tokens_per_message", "build_helpers", "parse_response", "parse_response_robustness", "incremental"),
    *("preserve_thinking", "tool_arg_type_preservation", "custom", "roundtrip", "parity"),
]
MODELS = {"Qwen/Qwen3-VL-4B-Instruct": "qwen3_vl", "Qwen/Qwen3.5-9B": "qwen3_5"}
"""Directories of `shared/models` by the names that their tests have for them."""

REASONS = {"test_qwen3_vl_renderer_exposes_image_modality": "it asks for their own class"}
"""Tests of theirs that do not pass, and why; beside these, those that name a model which is not there."""


@pytest.mark.timeout(1800)
def test_their_own_tests_pass_but_for_reasons_that_are_known(shared_models, tmp_path):
    hub_cache(tmp_path / "home", {name: shared_models / folder for name, folder in MODELS.items()})
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    wanted = ["--no-binary", ":all:", "--dest", tmp_path, f"renderers=={renderers.__version__}"]
    subprocess.run([*pip, *wanted], check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    source = tmp_path / archive.name.removesuffix(".tar.gz")
    report = tmp_path / "report.xml"
    environment = {
        **os.environ,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(HERE), str(source)]),
    }
    options = [
        "-q",
        "-p",
        "renderers_through_facade",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
        "--tb=short",
    ]
    subprocess.run(
        [
            *(sys.executable, "-m", "pytest", *options, f"--junitxml={report}"),
            *[f"tests/test_{name}.py" for name in FILES],
        ],
        cwd=source,
        env=environment,
        check=False,
        timeout=1500,
    )
    passed, failed = 0, defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        faults = [*case.iter("failure"), *case.iter("error")]
        passed += not faults and not [*case.iter("skipped")]
        if faults and "Cannot find the requested files in the disk cache" not in (faults[0].text or ""):
            failed[case.get("name").partition("[")[0]].append(case.get("name"))
    print(f"renderers {renderers.__version__}: {passed} of its tests pass through the facade")
    for name, cases in failed.items():
        print(f"{len(cases):3} x {name}: {REASONS.get(name)}")
    assert set(failed) == set(REASONS)
    assert passed >= 430
