"""One collator for Transformers' Trainer, TRL's SFTTrainer and a DataLoader."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from kit import assistant, data_url, error_of, noise, shown, text
from mmrender import Renderer, build_training_sample
from mmrender.errors import BatchError, InputError, MessageError
from mmrender.training import Collator, ModelFamily, collate
from mmrender.training import samples as samples_of_rows
from training_cases import family_of


def conversation(index: int) -> dict[str, Any]:
    """One example in each form: messages with the image in place or beside, a prompt and a completion."""
    parts: list[Any] = [text(f"Question {index}?")]
    image = {"type": "image"} if index % 3 == 1 else shown(noise(index, 60, 40))
    user = {"role": "user", "content": parts if index % 4 == 3 else [image, *parts]}
    answer = assistant(f"Answer {index}.")
    images = [noise(index, 60, 40)] if index % 3 == 1 and index % 4 != 3 else None
    if index % 2:
        return {"prompt": [user], "completion": [answer], "images": images}
    return {"messages": [user, answer], "images": images, "tools": None}


CONVERSATIONS = [conversation(index) for index in range(8)]


@pytest.fixture(scope="module")
def collator(tiny_model: Path) -> Collator:
    renderer = Renderer.from_pretrained(tiny_model, image_backend="pil")
    return Collator(ModelFamily.from_config(tiny_model), pad_token_id=0, renderer=renderer, max_length=256)


def assert_equal(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value) if isinstance(value, torch.Tensor) else got[name] == value, name


@pytest.mark.parametrize("packed", [False, True])
def test_examples_become_what_their_samples_become(collator, packed):
    own = Collator(collator.family, 0, collator.renderer, packed=packed, multiple=8)
    samples = []
    for one in CONVERSATIONS:
        messages = one.get("messages") or [*one["prompt"], *one["completion"]]
        samples.append(build_training_sample(own.renderer, messages, images=one["images"]))
    rows = [list(range(8))] if packed else None
    batch = collate(samples, own.family, pad_token_id=0, rows=rows, multiple=8)
    assert_equal(own(CONVERSATIONS), batch.model_inputs() | {"labels": batch.labels()})
    assert_equal(own(samples), own(CONVERSATIONS))
    (segment,) = own.batch([{**CONVERSATIONS[0], "extra": {"group": 3}}]).segments[0]
    assert segment.extra == {"group": 3}


def test_workers_of_a_data_loader_collate_alike(collator):
    again = pickle.loads(pickle.dumps(collator))
    assert_equal(again(CONVERSATIONS[:4]), collator(CONVERSATIONS[:4]))
    loader = DataLoader(CONVERSATIONS, 4, collate_fn=collator, num_workers=1, multiprocessing_context="spawn")
    for inputs, start in zip(loader, (0, 4), strict=True):
        assert_equal(inputs, collator(CONVERSATIONS[start : start + 4]))


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (
            {"messages": [], "note": 1},
            "examples[0].note: an example has a column that is not read - expected messages, ",
        ),
        (
            {"prompt": "text", "completion": "x"},
            "examples[0]: an example holds messages, or a prompt and a completion - ",
        ),
        ({}, "examples[0]: an example holds messages, or a prompt and a completion - "),
        (
            {**CONVERSATIONS[0], **CONVERSATIONS[1]},
            "examples[0]: an example holds messages, or a prompt and a completion",
        ),
    ],
)
def test_other_examples_are_refused(collator, example, message):
    assert error_of(InputError, collator, [example]).startswith(message)


def test_an_error_of_a_conversation_names_its_example(collator):
    odd = {"messages": [{"role": "user", "content": "Hi."}, {"role": "assistnat", "content": "Hello."}]}
    message = error_of(MessageError, collator, [*CONVERSATIONS[:2], odd])
    assert message.startswith("examples[2].messages[1].role: unknown role - ")


def test_what_a_trainer_cannot_do_is_refused_at_once(collator):
    with pytest.raises(BatchError, match="packed rows of qwen3_5 need a block around each forward"):
        Collator(family_of("qwen3_5"), 0, packed=True)
    with pytest.raises(BatchError, match="left rows of qwen3_5 need a block around each forward"):
        Collator(family_of("qwen3_5"), 0, padding_side="left")
    with pytest.raises(InputError, match="a conversation needs a renderer"):
        Collator(family_of("qwen3_vl"), 0)(CONVERSATIONS[:1])
    short = replace(collator, max_length=4)
    with pytest.raises(BatchError, match=r"examples\[0\]: no token of the first 4 is trained on"):
        short([CONVERSATIONS[0]])


def trained(
    trainer_class: Any, arguments: Any, collator: Collator, tiny_model: Path, data: Any, **others: Any
) -> Any:
    """Train two steps, and return the losses, and that of the first batch by hand."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(tiny_model, dtype=torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        expected = float(model(**collator([data[index] for index in range(4)])).loss)
    trainer = trainer_class(model=model, args=arguments, data_collator=collator, train_dataset=data, **others)
    trainer._get_train_sampler = lambda *_: None  # in order, so that the first batch is known
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    assert any("visual" in name for name in changed)
    assert any("language_model" in name for name in changed)
    return losses, expected


SETTINGS: dict[str, Any] = {
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": True,
    "learning_rate": 1e-2,
    "remove_unused_columns": False,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("packed", [False, True])
def test_transformers_trainer_trains(collator, tiny_model, tmp_path, packed):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate: the dependency group `trainers`")
    from transformers import Trainer, TrainingArguments

    own = Collator(collator.family, 0, collator.renderer, packed=packed)
    losses, expected = trained(
        Trainer, TrainingArguments(tmp_path, **SETTINGS), own, tiny_model, CONVERSATIONS
    )
    assert len(losses) == 2
    assert losses[0] == pytest.approx(expected, abs=1e-3)


def stored(datasets: Any) -> Any:
    """Conversations as Arrow keeps them, which gives every part the keys of all, None where it has none."""
    examples = []
    for index in range(8):
        url = data_url(noise(index, 60, 40))
        parts = [shown(url), text(f"Question {index}?")]
        answer = [text(f"Answer {index}.")]
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
        examples.append({"messages": messages})
    return datasets.Dataset.from_list(examples)


@pytest.mark.filterwarnings("ignore")
def test_trl_trains(collator, tiny_model, tmp_path):
    trl = pytest.importorskip("trl", reason="the dependency group `trainers`")
    datasets = pytest.importorskip("datasets", reason="the dependency group `trainers`")
    from transformers import AutoTokenizer

    arguments = trl.SFTConfig(
        tmp_path, **SETTINGS, dataset_kwargs={"skip_prepare_dataset": True}, max_length=None, bf16=False
    )
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    losses, expected = trained(
        trl.SFTTrainer, arguments, collator, tiny_model, stored(datasets), processing_class=tokenizer
    )
    assert len(losses) == 2
    assert losses[0] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("option", ["train_on", "weights", "select", "final_stop", "on_rewritten"])
def test_a_row_sets_template_variables_and_no_option_of_the_sample(collator, option):
    row = {**CONVERSATIONS[0], "chat_template_kwargs": {option: "all_messages"}}
    with pytest.raises(InputError, match="this argument") as caught:
        collator([row])
    assert caught.value.where == f"examples[0].chat_template_kwargs.{option}"


def test_a_row_s_template_variables_go_before_those_of_all(monkeypatch):
    passed = {}
    monkeypatch.setattr(
        samples_of_rows, "build_training_sample", lambda *_, **options: passed.update(options)
    )
    options = {"train_on": "all_messages", "day": 1, "chat_template_kwargs": {"a": 1, "b": 1}}
    row = {"messages": [assistant("Yes.")], "chat_template_kwargs": {"b": 2, "day": 2}}
    samples_of_rows.row_sample(None, row, options)
    variables = {"a": 1, "b": 2, "day": 2}
    assert passed == {"sample_id": "", "train_on": "all_messages", "chat_template_kwargs": variables}


def test_weights_that_labels_cannot_carry_are_refused(collator):
    messages = [{"role": "user", "content": "Hi."}, assistant("Yes.", weight=0.5)]
    with pytest.raises(BatchError, match="messages have weights, and a loss over labels ignores them"):
        collator([{"messages": messages}])
    weights = collator.batch([{"messages": messages}]).loss_weights
    assert weights is not None
    assert weights.unique().tolist() == [0.0, 0.5]
    whole = [messages[0], {**messages[1], "weight": 1}]
    assert (collator([{"messages": whole}])["labels"] >= 0).any()


@pytest.mark.parametrize("model_name", ["qwen3_5", "qwen3_vl_thinking", "qwen3_vl"])
def test_data_without_reasoning_trains_models_that_reason(renderers, shared_models, model_name):
    """As the page on TRL has it: both forms of an example, packed if the family allows it."""
    renderer = renderers(model_name)
    family = ModelFamily.from_config(shared_models / model_name)
    collator = Collator(family, 0, renderer, packed="auto")
    ask, answer = {"role": "user", "content": "Moo?"}, assistant("A cow.")
    for example in ({"messages": [ask, answer]}, {"prompt": [ask], "completion": [answer]}):
        labels = collator([example] * 3)["labels"]
        assert len(labels) == (3 if family.recurrent else 1)
        assert renderer.decode(labels[labels >= 0].tolist()) == "A cow.<|im_end|>" * 3
