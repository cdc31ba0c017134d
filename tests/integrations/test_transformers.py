"""`mmrender.integrations.transformers.Processor` against each family's own processor."""

import numpy as np
import pytest
import torch
from PIL import Image

from mmrender.errors import InputError
from mmrender.integrations.transformers import Processor
from mmrender.testing.reference import ReferenceRenderer

FAMILIES = ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "internvl3", "idefics3", "glm4_5v"]
NOT_THEIRS = {"return_tensors": "pt", "padding": True}
# GLM's processor gives tensors to numpy, which warns of torch's older protocol.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def picture(width, height):
    pixels = np.arange(width * height * 3, dtype=np.uint32).reshape(height, width, 3) * 7 % 251
    return Image.fromarray(pixels.astype(np.uint8))


def conversation(*sizes):
    parts = [{"type": "image", "image": picture(*size)} for size in sizes]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "Which is it?"}]}]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, shared_models):
    directory = shared_models / request.param
    reference = ReferenceRenderer(directory, "torch")
    reference.processor.chat_template = reference._templates
    return Processor.from_pretrained(str(directory)), reference.processor


def equal(ours, theirs):
    # A processor also gives token types where the model of its family takes none.
    assert set(ours) == set(theirs) - ({"mm_token_type_ids"} - set(ours))
    for name in ours:
        assert torch.equal(ours[name], theirs[name].to(ours[name].dtype)), name
        assert ours[name].shape == theirs[name].shape, name


@pytest.mark.parametrize("sizes", [(), ((64, 40),), ((300, 97), (64, 640), (224, 224))])
def test_texts_and_images_give_what_the_familys_processor_gives(pair, sizes):
    ours, theirs = pair
    text = theirs.apply_chat_template(conversation(*sizes), tokenize=False, add_generation_prompt=True)
    images = [picture(*size) for size in sizes] or None
    equal(ours(images, text), theirs(images, text, **NOT_THEIRS))


def test_messages_give_what_the_familys_processor_gives(pair):
    ours, theirs = pair
    messages = conversation((120, 90), (64, 40))
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    equal(ours.apply_chat_template(messages, **options), theirs.apply_chat_template(messages, **options))
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages, tokenize=False)


def test_rows_are_padded_on_the_left(pair):
    ours, theirs = pair
    rows = [conversation((120, 90)), conversation(), conversation((64, 40), (64, 40))]
    texts = [theirs.apply_chat_template(row, tokenize=False) for row in rows]
    images = [picture(120, 90), picture(64, 40), picture(64, 40)]
    theirs.tokenizer.padding_side = "left"
    theirs.tokenizer.pad_token_id = ours.pad_token_id
    nested = [[images[0]], [], images[1:]]
    expected = theirs(nested, texts, **NOT_THEIRS)
    equal(ours(nested, texts), expected)
    equal(ours(images, texts), expected)


def test_a_response_template_is_read_as_transformers_reads_it(tiny_model):
    processor = Processor.from_pretrained(str(tiny_model))
    said = processor.renderer.tokenizer.encode("<think>\nHm.\n</think>\nYes.<|im_end|>")
    with pytest.raises(InputError, match="has no response template"):
        processor.parse_response(said, prompt_ids=[])
    spec = {
        "start_anchor": "<|im_start|>assistant\n",
        "defaults": {"role": "assistant"},
        "fields": {
            "thinking": {"open": "<think>\n", "close": "\n</think>\n"},
            "content": {"close": "<|im_end|>"},
        },
    }
    processor = Processor(
        processor.renderer, processor.family, processor.pad_token_id, response_template=spec
    )
    message = processor.parse_response(said, prompt_ids=[])
    assert message == {"role": "assistant", "thinking": "Hm.", "content": "Yes."}


def test_a_call_takes_texts_or_messages(tiny_model):
    processor = Processor.from_pretrained(str(tiny_model))
    for wrong in ({}, {"text": "a", "messages": []}, {"text": "a", "tools": []}):
        with pytest.raises(InputError, match="either texts or messages"):
            processor(**wrong)
    with pytest.raises(InputError, match="several conversations"):
        processor(picture(9, 9), messages=[conversation(), conversation()])


def test_options_of_a_processor_are_read_or_refused(tiny_model):
    processor = Processor.from_pretrained(str(tiny_model))
    plain = processor(text="a")
    for row in ({}, {"images": []}, {"padding": False}):
        equal(processor(text="a", return_tensors="pt", **{"padding": True, **row}), plain)
    wrong = [
        {"return_tensors": "np"},
        {"padding": "max_length"},
        {"padding": False},
        {"images": [[], [], []]},
    ]
    for options in wrong:
        with pytest.raises(InputError):
            processor(text=["a", "b"], **options)
    with pytest.raises(InputError, match="tokens come in a dict"):
        processor.apply_chat_template(conversation(), tokenize=True, return_dict=False)
