"""The prompt as the template wrote it, for engines that widen placeholders themselves."""

import io

import pytest
from PIL import Image

from kit import assistant, error_of, shown, text
from mmrender.errors import PlaceholderError
from mmrender.media.encoded import encoded_image

SIZES = ((30, 50), (224, 224), (97, 300))


def question(*sizes):
    images = [shown(Image.new("RGB", size, (9, 99, 199))) for size in sizes]
    return {"role": "user", "content": [*images, text("<|image_pad|> Which?")]}


@pytest.mark.parametrize("count", [0, 1, 3])
def test_collapsed_ids_are_those_of_the_text_with_each_placeholder_once(renderer, count):
    rendered = renderer.render([question(*SIZES[:count])], add_generation_prompt=True)
    # Independent of every range: the run of pads that follows an image's opening token, as one.
    once, pad = [], renderer.tokenizer.token_id("<|image_pad|>")
    for token in rendered.token_ids:
        if not (token == pad and once[-1] == pad):
            once.append(token)
    assert rendered.collapsed_ids == once
    assert once.count(pad) == count


def test_a_bridge_collapses_as_the_whole_conversation_does(renderer):
    first = renderer.render([question(SIZES[0])], add_generation_prompt=True)
    (stop,) = renderer.profile.end_ids
    completion = [*renderer.tokenizer.encode("This one."), stop]
    bridged = renderer.bridge_to_next_turn(
        first.token_ids, completion, [question(*SIZES[1:])], previous_multi_modal_data=first.multi_modal_data
    )
    history = [question(SIZES[0]), assistant("This one."), question(*SIZES[1:])]
    assert bridged.collapsed_ids == renderer.render(history, add_generation_prompt=True).collapsed_ids


def test_a_vllm_prompt_holds_images_that_process_to_the_same_items(renderer):
    rendered = renderer.render([question(*SIZES)], add_generation_prompt=True)
    prompt = rendered.to_vllm_prompt()
    again = renderer.render([question(*SIZES)], add_generation_prompt=True).multi_modal_data.mm_items["image"]
    assert prompt["prompt_token_ids"] == rendered.collapsed_ids
    assert prompt["multi_modal_uuids"] == {"image": [item.identity for item in again]}
    for image, item in zip(prompt["multi_modal_data"]["image"], again, strict=True):
        assert image.tobytes() == Image.open(io.BytesIO(encoded_image(item).data)).tobytes()
        own = renderer.render([{"role": "user", "content": [shown(image)]}])
        found = own.multi_modal_data.mm_items["image"][0]
        assert (found.tensors()["pixel_values"] == item.tensors()["pixel_values"]).all()


def test_a_prompt_without_images_is_its_tokens_and_a_cut_one_is_refused(renderer):
    assert renderer.render([question()]).to_vllm_prompt() == {
        "prompt_token_ids": renderer.render([question()]).token_ids
    }
    rendered = renderer.render([question(SIZES[1])])
    del rendered.token_ids[-40:]
    assert "leaves the sequence" in error_of(PlaceholderError, rendered.to_vllm_prompt)
