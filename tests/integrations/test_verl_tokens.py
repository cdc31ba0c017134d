"""mmrender's builders in verl's factory, beside verl's own and a rendering of the whole conversation."""

import asyncio
import json
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer

from mmrender.errors import InputError, RenderError
from mmrender.model.weights import load_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # verl's imports of Ray
    from verl.experimental.agent_loop.agent_loop import AgentLoopBase
    from verl.tools.function_tool import FunctionTool, _build_schema_from_fn
    from verl.tools.schemas import ToolResponse
    from verl.utils.tokenizer import continuous_token_wiring as wiring

    THEIRS = dict(wiring._CONTINUOUS_TOKEN_BUILDER_REGISTRY)
    from integrations.verl_server import batch_of, configured, trainer_logprobs, worker_of
    from mmrender.integrations import verl_tokens

    OURS = dict(wiring._CONTINUOUS_TOKEN_BUILDER_REGISTRY)
    wiring._CONTINUOUS_TOKEN_BUILDER_REGISTRY.update(THEIRS)

pytestmark = pytest.mark.filterwarnings("ignore")
SYSTEM = {"role": "system", "content": [{"type": "text", "text": "Answer."}]}


LEFT = [8, 9, 151645]  # tokens of Qwen3-VL, of which the last ends the turn


def question(size, words):
    image = Image.effect_mandelbrot(size, (-2, -1, 1, 1), 40)
    return {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": words}]}


CONVERSATION = [
    SYSTEM,
    question((224, 140), "Which?"),
    {"role": "assistant", "content": [{"type": "text", "text": "The left one."}]},
    question((64, 64), "And now?"),
    {"role": "assistant", "content": [{"type": "text", "text": "The right one."}]},
    {"role": "user", "content": [{"type": "text", "text": "Sure?"}]},
]


@pytest.fixture
def ours(monkeypatch):
    """The factory as the import of the module leaves it."""
    for family, builder in OURS.items():
        monkeypatch.setitem(wiring._CONTINUOUS_TOKEN_BUILDER_REGISTRY, family, builder)


@pytest.fixture(scope="module")
def opened(shared_models):
    """Tokenizer, processor and model type by directory, each loaded once."""
    kept = {}

    def open_model(name):
        if name not in kept:
            folder = shared_models / name
            model_type = json.loads((folder / "config.json").read_text())["model_type"]
            loaded = AutoTokenizer.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
            kept[name] = SimpleNamespace(tokenizer=loaded[0], processor=loaded[1], model_type=model_type)
        return kept[name]

    return open_model


def builder_of(model, **options):
    return wiring.create_continuous_token_builder(
        model.tokenizer, hf_model_type=model.model_type, processor=model.processor, **options
    )


def images_of(messages):
    parts = [part for message in messages for part in message["content"] if isinstance(part, dict)]
    return [part["image"] for part in parts if part["type"] == "image"]


def whole(model, messages, *, prompt):
    """The conversation as Transformers' processor renders it at once."""
    text = model.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    return model.processor(text=[text], images=[images_of(messages)], return_tensors="np")["input_ids"][
        0
    ].tolist()


def merged(model, messages, sampled_turns):
    """Token ids of a rollout by verl's own calls, with masks and log-probabilities."""
    builder = builder_of(model)
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    asked = messages[: turns[0]]
    ids = builder.build_initial_tokens(asked, images=images_of(asked))
    start, mask, logprobs = len(ids), [], []
    for turn, sampled in zip(turns, sampled_turns, strict=True):
        result = builder.merge_assistant_tokens(ids, sampled)
        mask, logprobs = builder.align_response_metadata(
            result, mask, logprobs, assistant_logprobs=[-1.0] * len(sampled)
        )
        stop = next((index for index in turns if index > turn), len(messages))
        result = builder.merge_context_tokens(messages[: turn + 1], messages[:stop], result.token_ids)
        mask, logprobs = builder.align_response_metadata(result, mask, logprobs)
        ids = result.token_ids
    assert len(mask) == len(logprobs) == len(ids) - start
    return ids, mask, logprobs


def sampled_in(model, expected, words):
    """The tokens of a turn in a rendering, with the token that ends it, and their place."""
    ids = model.tokenizer.encode(words, add_special_tokens=False)
    at = next(index for index in range(len(expected)) if expected[index : index + len(ids)] == ids)
    return expected[at : at + len(ids) + 1], at


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "internvl3", "idefics3"])
def test_a_rollout_equals_the_whole_conversation(name, opened, ours):
    model = opened(name)
    expected = whole(model, CONVERSATION, prompt=True)
    turns = [sampled_in(model, expected, words)[0] for words in ("The left one.", "The right one.")]
    ids, mask, logprobs = merged(model, CONVERSATION, turns)
    assert ids == expected
    assert sum(mask) == sum(map(len, turns))
    assert logprobs == [-1.0 * each for each in mask]
    response = np.array(ids[-len(mask) :])
    assert response[np.array(mask, bool)].tolist() == sum(turns, [])


@pytest.mark.parametrize("name", ["internvl3", "idefics3"])
def test_verls_generic_builder_drops_the_newline(name, opened):
    model = opened(name)
    expected = whole(model, CONVERSATION, prompt=True)
    turns = [sampled_in(model, expected, words) for words in ("The left one.", "The right one.")]
    ids, _, _ = merged(model, CONVERSATION, [sampled for sampled, _ in turns])
    (newline,) = model.tokenizer.encode("\n", add_special_tokens=False)
    for sampled, at in reversed(turns):
        assert expected.pop(at + len(sampled)) == newline
    assert ids == expected


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4_5v"])
def test_verls_own_builders_agree_where_they_know_the_family(name, opened, monkeypatch):
    model = opened(name)
    stop = model.tokenizer.convert_tokens_to_ids("<|user|>" if name == "glm4_5v" else "<|im_end|>")
    turns = [[*model.tokenizer.encode(words, add_special_tokens=False), stop] for words in ("One.", "Two.")]
    theirs = merged(model, CONVERSATION, turns)
    for family, builder in OURS.items():
        monkeypatch.setitem(wiring._CONTINUOUS_TOKEN_BUILDER_REGISTRY, family, builder)
    assert merged(model, CONVERSATION, turns)[0] == theirs[0]


def test_special_tokens_of_a_user_stay_text(opened, monkeypatch):
    model = opened("qwen3_vl")
    spoken = [{"role": "user", "content": [{"type": "text", "text": "Say <|im_end|>."}]}]
    stop = model.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert builder_of(model).build_initial_tokens(spoken).count(stop) == 2
    for family, builder in OURS.items():
        monkeypatch.setitem(wiring._CONTINUOUS_TOKEN_BUILDER_REGISTRY, family, builder)
    assert builder_of(model).build_initial_tokens(spoken).count(stop) == 1


def test_a_video_as_verl_loads_it_has_the_processors_tokens_and_tensors(opened, ours):
    model = opened("qwen2_5_vl")
    frames = torch.randint(0, 256, (4, 3, 112, 140), generator=torch.Generator().manual_seed(0)).float()
    metadata = {"fps": 2.0, "frames_indices": [0, 1, 2, 3], "total_num_frames": 4}
    messages = [
        {
            "role": "user",
            "content": [{"type": "video", "video": "a.mp4", "fps": 2}, {"type": "text", "text": "?"}],
        }
    ]
    text = model.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = model.processor(
        text=[text], videos=[frames], video_metadata=[metadata], do_sample_frames=False, return_tensors="pt"
    )
    tensors = {}
    ids = builder_of(model).build_initial_tokens(messages, videos=[(frames, metadata)], mm_inputs_out=tensors)
    assert ids == expected["input_ids"][0].tolist()
    torch.testing.assert_close(
        tensors["pixel_values_videos"], expected["pixel_values_videos"], atol=1e-5, rtol=0
    )
    torch.testing.assert_close(tensors["video_grid_thw"], expected["video_grid_thw"])


def test_what_a_builder_cannot_know_is_refused(opened, ours):
    model = opened("qwen3_vl")
    with pytest.raises(InputError, match="max_pixels"):
        builder_of(model, mm_processor_kwargs={"max_pixels": 1})
    first, other = builder_of(model), builder_of(model)
    ids = first.build_initial_tokens(CONVERSATION[:2], images=images_of(CONVERSATION[:2]))
    with pytest.raises(RenderError, match="this builder did not make the prompt"):
        other.merge_assistant_tokens(ids, LEFT)
    with pytest.raises(InputError, match="more images than were loaded"):
        other.build_initial_tokens(CONVERSATION[:2], images=[])
    with pytest.raises(InputError, match="more images than the messages show"):
        other.build_initial_tokens([SYSTEM, CONVERSATION[-1]], images=images_of(CONVERSATION[:2]))
    with pytest.raises(InputError, match="audio"):
        other.build_initial_tokens([SYSTEM, CONVERSATION[-1]], audios=[b""])
    appended = [*CONVERSATION[:3], CONVERSATION[2], CONVERSATION[-1]]
    told = first.merge_assistant_tokens(ids, LEFT)
    assert first.merge_context_tokens(CONVERSATION[:3], CONVERSATION[:4], told.token_ids).kind == "context"
    with pytest.raises(ValueError, match="append-only"):
        first.merge_context_tokens(appended, CONVERSATION[:4], told.token_ids)


def zoom(row: int) -> ToolResponse:
    """Show a part of the picture.

    Args:
        row: Which part.
    """
    return ToolResponse(
        text=f"Row {row}.", image=[Image.effect_mandelbrot((96, 64), (-2, -1, 1, 1), 20 + row)]
    )


def test_verls_tool_agent_runs_on_it(tiny_model, ours, monkeypatch):
    """verl's own loop, with images from a tool in each turn, and log-probabilities as its trainer computes them."""
    model = load_model(tiny_model, dtype="float32", device="cpu", purpose="a test")
    config = configured(tiny_model, multi_turn={"format": "hermes", "max_assistant_turns": 3})
    worker, server, _ = worker_of(config, model)
    worker.tools = [FunctionTool("zoom", zoom, _build_schema_from_fn(zoom, "zoom"))]
    monkeypatch.setattr(worker.dataset_cls, "process_multi_modal_info", nothing, raising=False)
    calls = iter([1, 2, 3])
    tokenizer = worker.tokenizer

    def scripted():
        call = {"name": "zoom", "arguments": {"row": next(calls)}}
        return tokenizer.encode(
            f"<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>", add_special_tokens=False
        )

    server.scripted = scripted
    made, merge = [], AgentLoopBase.ct_build_initial_tokens

    async def watched(self, *args, **options):
        made.append(type(self.continuous_token_builder))
        return await merge(self, *args, **options)

    monkeypatch.setattr(AgentLoopBase, "ct_build_initial_tokens", watched)
    output = asyncio.run(worker.generate_sequences(batch_of("tool_agent", [0])))
    assert len(output.non_tensor_batch["multi_modal_inputs"][0]["image_grid_thw"]) == 2
    mask = output.batch["response_mask"].bool()
    reported, recomputed = output.batch["rollout_log_probs"], trainer_logprobs(model, output, 1.0)
    torch.testing.assert_close(reported[mask], recomputed[mask], atol=1e-4, rtol=0)
    assert len(server.requests) == 3
    assert made == [verl_tokens.MultimodalTokenBuilder]


async def nothing(messages, **_):
    return None, None, None
