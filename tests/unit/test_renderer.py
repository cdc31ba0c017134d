"""What the facade refuses, and what it takes by call."""

from contextlib import nullcontext

import pytest

from mmrender import Renderer, RendererPool
from mmrender.errors import (
    InputError,
    MessageError,
    TemplateMissingError,
    TemplateSyntaxError,
)
from mmrender.probing.templates import TemplateSet
from mmrender.protocols import BridgeOptions, ParseOptions, RenderOptions
from small_models import MODELS

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def printing():
    return MODELS["everything"].renderer()


CALLS = {
    "render": (lambda renderer, **given: renderer.render(USER, **given), RenderOptions),
    "text": (lambda renderer, **given: renderer.render_text(USER, **given), RenderOptions),
    "bridge": (lambda renderer, **given: renderer.bridge_to_next_turn([1], [2], USER, **given), BridgeOptions),
    "parse": (lambda renderer, **given: renderer.parse_response([1], **given), ParseOptions),
}  # fmt: skip
RESERVED = (
    *("messages", "tools", "documents", "add_generation_prompt", "chat_template", "bos_token"),
    *("eos_token", "unk_token", "namespace", "raise_exception", "strftime_now", "range"),
)


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_an_argument_that_nobody_reads_is_an_error(printing, name, pooled):
    call, options = CALLS[name]
    with RendererPool(printing, workers=1) if pooled else nullcontext(printing) as renderer:
        for known in (*options.__annotations__, "persona"):
            torn = known[:3] + known[4:]
            for given, where in (
                ({torn: None}, torn),
                ({"chat_template_kwargs": {torn: None}}, f"chat_template_kwargs.{torn}"),
            ):
                with pytest.raises(InputError) as caught:
                    call(renderer, **given)
                assert (caught.value.where, caught.value.remedy) == (where, f"Did you mean {known!r}?")
        for taken in RESERVED:
            with pytest.raises(InputError, match=f"{taken!r} is not for callers to set"):
                call(renderer, chat_template_kwargs={taken: "x"})
        for taken in ("bos_token", "namespace", "raise_exception", "eos_token"):
            with pytest.raises(InputError, match=f"{taken!r} is not for callers to set"):
                call(renderer, **{taken: "x"})


def test_the_errors_for_arguments_list_what_there_is(printing):
    keywords = (
        "tools, documents, images, videos, add_generation_prompt, continue_final_message, chat_template"
    )
    with pytest.raises(InputError) as caught:
        printing.render(USER, max_pixels=100)
    assert str(caught.value) == (
        "max_pixels: neither the renderer nor the chat template reads this argument - "
        f"expected one of persona, {keywords}, chat_template_kwargs. Leave it out"
    )
    with pytest.raises(InputError) as caught:
        printing.template_profile(eos_token="x")
    assert str(caught.value) == (
        "eos_token: 'eos_token' is not for callers to set. Only variables of the chat template's own go here"
    )


def test_a_template_by_call_has_its_own_profile(printing):
    """It renders, bridges and parses as a renderer that was opened with it, and leaves the other as it is."""
    source = "{% for m in messages %}<|im_start|>{{ m.role }}:{{ mood }}{{ m.content }}<|im_end|>{% endfor %}"
    source += "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
    given = {"chat_template": source}
    other = Renderer(TemplateSet({"default": source}, printing.tokenizer), printing.tokenizer)
    before = printing.render(USER, add_generation_prompt=True)
    ours = printing.render(USER, add_generation_prompt=True, mood="glad", **given)
    assert ours == other.render(USER, add_generation_prompt=True, mood="glad")
    assert printing.render(USER, add_generation_prompt=True) == before != ours
    completion = [*printing.tokenizer.encode("hello"), *printing.get_stop_token_ids()]
    bridged = printing.bridge_to_next_turn(ours.token_ids, completion, USER, **given)
    expected = other.bridge_to_next_turn(ours.token_ids, completion, USER)
    assert bridged.token_ids == expected.token_ids
    assert bridged.token_ids != printing.bridge_to_next_turn(ours.token_ids, completion, USER).token_ids
    assert printing.parse_response(completion, **given).content == "hello"
    assert printing.template_profile(**given).arguments == ("mood",)
    with pytest.raises(InputError, match="reads this argument"):
        printing.render(USER, persona="x", **given)
    with pytest.raises(TemplateMissingError, match="no chat template named 'other'"):
        printing.render(USER, chat_template="other")
    with pytest.raises(TemplateSyntaxError):
        printing.render(USER, chat_template="{% if %}")


def test_template_variables_come_as_keywords_or_in_one_mapping(printing):
    one = printing.render(USER, persona="a pirate")
    assert one.token_ids == printing.render(USER, chat_template_kwargs={"persona": "a pirate"}).token_ids
    assert "a pirate" in one.text


@pytest.mark.parametrize("part", [{"type": "image", "image": None}, {"type": "image"}])
def test_an_image_without_a_source_is_named(renderer, part):
    with pytest.raises(MessageError) as caught:
        renderer.render([{"role": "user", "content": [{"type": "text", "text": "what?"}, part]}])
    assert caught.value.where == "messages[0].content[1]"
    assert "no source" in str(caught.value)
