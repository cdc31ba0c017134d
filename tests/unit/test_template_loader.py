"""Where chat templates and special tokens are found, compared with what Transformers finds."""

import json

import pytest
import transformers
from transformers import PreTrainedTokenizerFast
from transformers.processing_utils import ProcessorMixin

from kit import error_of
from mmrender.client.sampling import check_sampling_params
from mmrender.errors import ModelError, TemplateError, TemplateMissingError
from mmrender.model.files import ModelDir
from mmrender.template.sources import choose_template, load_templates
from small_models import build_engine

NAMED = [{"name": "default", "template": "CONFIG"}, {"name": "tool_use", "template": "TOOLS"}]


@pytest.fixture
def model(tmp_path):
    """Writes a model directory: templates by place."""

    def write(*, tokenizer=None, jinja=None, legacy=None, processor=None, image=None, more=None, config=None):
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **(config or {})}
        if tokenizer is not None:
            settings["chat_template"] = tokenizer
        files = {"tokenizer_config.json": settings}
        files |= {} if legacy is None else {"chat_template.json": {"chat_template": legacy}}
        files |= {} if processor is None else {"processor_config.json": {"chat_template": processor or None}}
        files |= {} if image is None else {"preprocessor_config.json": {"chat_template": image or None}}
        for name, value in files.items():
            (tmp_path / name).write_text(json.dumps(value))
        for name, text in (more or {}).items():
            (tmp_path / "additional_chat_templates").mkdir(exist_ok=True)
            (tmp_path / "additional_chat_templates" / f"{name}.jinja").write_text(text)
        if jinja is not None:
            (tmp_path / "chat_template.jinja").write_text(jinja)
        return ModelDir(tmp_path)

    return write


def named(value):
    return {"default": value} if isinstance(value, str) else value or {}


WITHOUT_PROCESSOR = {
    "tokenizer config": ({"tokenizer": "CONFIG"}, {"default": "CONFIG"}),
    "named in tokenizer config": ({"tokenizer": NAMED}, {"default": "CONFIG", "tool_use": "TOOLS"}),
    "jinja over config": ({"jinja": "JINJA", "tokenizer": "CONFIG"}, {"default": "JINJA"}),
    "jinja and more": ({"jinja": "JINJA", "more": {"rag": "RAG"}}, {"default": "JINJA", "rag": "RAG"}),
    "more over config": ({"more": {"rag": "RAG"}, "tokenizer": NAMED}, {"rag": "RAG"}),
    "config over legacy": ({"legacy": "LEGACY", "tokenizer": "CONFIG"}, {"default": "CONFIG"}),
    "nothing": ({}, {}),
}
WITH_PROCESSOR = {
    "jinja": ({"jinja": "JINJA", "tokenizer": "CONFIG"}, {"default": "JINJA"}),
    "jinja over named": ({"jinja": "JINJA", "tokenizer": NAMED}, {"default": "JINJA"}),
    "legacy over config": ({"legacy": "LEGACY", "tokenizer": "CONFIG"}, {"default": "LEGACY"}),
    "legacy over jinja": ({"legacy": "LEGACY", "jinja": "JINJA"}, {"default": "LEGACY"}),
    "processor config over all": (
        {"processor": "PROCESSOR", "legacy": "LEGACY", "jinja": "JINJA", "tokenizer": NAMED},
        {"default": "PROCESSOR"},
    ),
    "processor config over more": (
        {"processor": "PROCESSOR", "more": {"rag": "RAG"}},
        {"default": "PROCESSOR"},
    ),
    "jinja and more": (
        {"jinja": "JINJA", "more": {"rag": "RAG", "tool_use": "T"}},
        {"default": "JINJA", "rag": "RAG", "tool_use": "T"},
    ),
    "more called default": ({"jinja": "JINJA", "more": {"default": "MORE"}}, {"default": "JINJA"}),
}
ONLY_HERE = {
    "the tokenizer's, where the processor has none": ({"processor": "", "tokenizer": "CONFIG"}, "CONFIG"),
    "preprocessor config": ({"image": "IMAGE"}, "IMAGE"),
    "tokenizer config over preprocessor config": ({"image": "IMAGE", "tokenizer": "CONFIG"}, "CONFIG"),
    "legacy of a text model": ({"legacy": "LEGACY"}, "LEGACY"),
    "empty jinja": ({"jinja": "", "tokenizer": "CONFIG"}, "CONFIG"),
    "default among more only": ({"more": {"default": "MORE"}}, "MORE"),
}


@pytest.mark.parametrize("case", WITHOUT_PROCESSOR)
def test_models_without_a_processor_are_read_as_the_tokenizer_of_transformers_does(model, case):
    files, expected = WITHOUT_PROCESSOR[case]
    directory = model(**files)
    build_engine(()).save(str(directory.path / "tokenizer.json"))
    assert named(PreTrainedTokenizerFast.from_pretrained(directory.path).chat_template) == expected
    assert load_templates(directory) == expected


# Transformers leaves the files of `additional_chat_templates/` open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("case", WITH_PROCESSOR)
def test_models_with_a_processor_are_read_as_the_processor_of_transformers_does(model, case):
    files, expected = WITH_PROCESSOR[case]
    directory = model(**{"processor": "", **files})
    reference, _ = ProcessorMixin.get_processor_dict(directory.path)
    assert named(reference.get("chat_template")) == expected
    assert load_templates(directory) == expected


@pytest.mark.parametrize("case", ONLY_HERE)
def test_what_transformers_overlooks_is_taken_last(model, case):
    files, expected = ONLY_HERE[case]
    assert load_templates(model(**files)) == {"default": expected}


def test_templates_that_exclude_each_other_or_are_no_text_are_refused(model, sentence):
    assert error_of(TemplateMissingError, load_templates, model(tokenizer=[{"name": "default"}])) == sentence
    directory = model(processor="", legacy="LEGACY", more={"rag": "RAG"})
    assert "conflicting files" in error_of(ValueError, ProcessorMixin.get_processor_dict, directory.path)
    error = error_of(TemplateError, load_templates, directory)
    assert error.replace(str(directory.path), "MODEL") == sentence


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [("chat_template.json", b"{", "JSON, got "), ("chat_template.jinja", b"\xff", "UTF-8")],
)
def test_a_file_that_cannot_be_read_is_named(model, name, content, kind):
    directory = model()
    (directory.path / name).write_bytes(content)
    with pytest.raises(ModelError, match=rf"{name}: cannot read {name} - expected {kind}"):
        load_templates(directory)


SEVERAL = {"default": "D", "tool_use": "T", "rag": "R"}
WITHOUT_DEFAULT = {"rag": "R", "tool_use": "T"}


@pytest.mark.parametrize(
    ("templates", "name", "has_tools", "expected"),
    [
        (SEVERAL, None, False, "default"),
        (SEVERAL, None, True, "tool_use"),
        (SEVERAL, "rag", True, "rag"),
        ({"default": "D"}, None, True, "default"),
        ({"rag": "R"}, None, False, "rag"),
        (WITHOUT_DEFAULT, None, True, "tool_use"),
    ],
)
def test_the_template_is_the_one_asked_for_or_the_usual_one(templates, name, has_tools, expected):
    assert choose_template(templates, name=name, has_tools=has_tools) == expected


MISSING = {"all": ({}, None), "a name": (SEVERAL, "chat"), "the default": (WITHOUT_DEFAULT, None)}


@pytest.mark.parametrize("case", MISSING)
def test_a_missing_template_is_named(case, sentence):
    templates, name = MISSING[case]
    assert error_of(TemplateMissingError, choose_template, templates, name=name, has_tools=False) == sentence


ADDED = {"__type": "AddedToken", "lstrip": False, "rstrip": False, "normalized": False, "special": True, "single_word": False}  # fmt: skip
TOKENS = {
    "texts": {"bos_token": "<s>", "eos_token": "</s>", "pad_token": None, "add_bos_token": True},
    "objects": {"bos_token": {**ADDED, "content": "<s>"}, "unk_token": {**ADDED, "content": "<u>"}},
    "model's own": {"image_token": "<image>", "boi_token": "<boi>", "eos_token": "</s>"},
    "named extras": {
        "extra_special_tokens": {"image_token": "<image>", "video": "<video>"},
        "bos_token": "<s>",
    },
    "listed extras": {"extra_special_tokens": ["<image>"], "bos_token": "<s>"},
    "old extras": {"additional_special_tokens": ["<image>"], "mask_token": "<m>"},
    "none": {},
}


@pytest.mark.parametrize("with_map", [False, True])
@pytest.mark.parametrize("with_decoder", [False, True])
@pytest.mark.parametrize("case", TOKENS)
def test_special_tokens_are_those_of_transformers(model, case, with_decoder, with_map, recwarn):
    directory = model(config={**TOKENS[case], **({"added_tokens_decoder": {}} if with_decoder else {})})
    if with_map:
        separator = {"content": "<sep>", "lstrip": False, "rstrip": False}
        entries = {"bos_token": "<from map>", "sep_token": separator}
        (directory.path / "special_tokens_map.json").write_text(json.dumps(entries))
    build_engine(("<s>", "</s>")).save(str(directory.path / "tokenizer.json"))
    transformers.logging.set_verbosity_error()
    reference = PreTrainedTokenizerFast.from_pretrained(directory.path).special_tokens_map
    assert ModelDir(directory.path).special_tokens == reference


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 9, "eos_token_id": 1, "penalty": 2},
         {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_tokens": 9}),
        ({"do_sample": False, "temperature": 0.6, "min_p": None}, {"temperature": 0.0}),
        ({"repetition_penalty": "1.1", "top_p": True}, {}),
    ],
)  # fmt: skip
def test_sampling_defaults_are_those_of_the_generation_config(tmp_path, config, expected):
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    found = ModelDir(tmp_path).sampling_defaults
    assert found == expected
    assert check_sampling_params(found) == expected
