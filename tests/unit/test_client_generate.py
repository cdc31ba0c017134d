"""generate(): render, check, call, parse; with a scripted engine and with a model in this process."""

import asyncio
import logging
import pickle
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from engine_cases import patient
from kit import assistant, error_of, raised, user
from mmrender import Renderer, generate
from mmrender.client.engine import Engine
from mmrender.client.local import LocalBackend
from mmrender.client.resolve import resolve_backend
from mmrender.client.sampling import DEFAULT_MAX_TOKENS
from mmrender.client.server_facts import forget
from mmrender.client.types import EngineRequest, EngineResponse, Usage
from mmrender.engines import InferenceEngineClient
from mmrender.errors import (
    EngineReplyError,
    EngineStatusError,
    InputError,
    PlaceholderError,
    PromptTooLongError,
)
from mmrender.renderer import RendererPool
from mmrender.sidecar import MultiModalData, collapse
from mmrender.testing.memory_transport import MemoryTransport
from mmrender.trajectory.engine_data import RoutedExperts, WeightVersionSpan
from rollout_cases import TOOLS, call
from scripted_engine import ScriptedEngine

PHOTO = Image.linear_gradient("L").convert("RGB").resize((160, 96))
QUESTION = [user("Which animal says moo?")]
WITH_PHOTO = [user("What is this?", PHOTO)]


@dataclass
class Scripted:
    """An engine that says what it is told to, and keeps what it was asked."""

    completion: list[int] = field(default_factory=lambda: [5, 6])
    finish_reason: Any = "length"
    limit: Any = 1000
    error: BaseException | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    name: str = "scripted"
    requests: list[EngineRequest] = field(default_factory=list)
    asked_limit: int = 0
    cancelled: int = 0
    gate: asyncio.Event | None = None
    server: MemoryTransport = field(default_factory=MemoryTransport)

    async def generate(self, request, transport, *, on_tokens=None):
        self.requests.append(request)
        if self.gate is not None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if self.error is not None:
            raise self.error
        usage = Usage(len(request.prompt_ids), len(self.completion), 3)
        logprobs = [-0.5] * len(self.completion)
        return EngineResponse(self.completion, logprobs, self.finish_reason, usage, **self.extra)

    async def resolve_max_prompt_len(self, model, transport):
        self.asked_limit += 1
        if isinstance(self.limit, BaseException):
            raise self.limit
        return self.limit

    def is_overflow_error(self, exc):
        return isinstance(exc, EngineStatusError) and "too long" in exc.body


def test_an_engine_finds_its_facts_once(renderer, monkeypatch):
    """Backend, server, limit, stop tokens and ids of texts are looked up once, however many turns there are."""
    looked_up = []
    stops, token_id = renderer.get_stop_token_ids, renderer.tokenizer.token_id
    monkeypatch.setattr(renderer, "get_stop_token_ids", lambda: looked_up.append("stops") or stops())
    monkeypatch.setattr(
        type(renderer.tokenizer), "token_id", lambda self, text: looked_up.append(text) or token_id(text)
    )
    scripted = Scripted()
    engine = Engine(scripted, scripted.server, model="tiny", renderer=renderer)
    prompt = renderer.render(WITH_PHOTO, add_generation_prompt=True)
    looked_up.clear()

    async def turns():
        return [await engine.turn(engine.prompt(attribution=prompt), cache_salt="a") for _ in range(3)]

    first, *others = asyncio.run(turns())
    assert first.completion_ids == [5, 6]
    assert [turn.message for turn in others] == [first.message] * 2
    assert looked_up.count("stops") == 1
    assert len(looked_up) == len(set(looked_up))
    assert scripted.asked_limit == 1
    assert [request.cache_salt for request in scripted.requests] == ["a"] * 3
    with pytest.raises(InputError, match="without a renderer"):
        asyncio.run(Engine(scripted, scripted.server).turn(engine.prompt([1], MultiModalData())))


def run(renderer, engine, **options):
    given = {"client": getattr(engine, "server", None), "messages": QUESTION, "model": "tiny"}
    return asyncio.run(generate(**{**given, "renderer": renderer, "backend": engine, **options}))


def saying(renderer, words, reason="stop"):
    """An engine that says words and the stop token."""
    return Scripted([*renderer.tokenizer.encode(words), renderer.get_stop_token_ids()[-1]], reason)


def refused(kind, renderer, engine=None, **options):
    return raised(kind, run, renderer, engine or Scripted(), **options)


def test_a_turn_is_rendered_called_and_read(renderer):
    engine = saying(renderer, "A cow.")
    options = {"cache_salt": "s", "priority": 2, "extra_headers": {"x": "1"}}
    turn = run(renderer, engine, sampling_params={"temperature": 0.5}, **options)
    prompt = renderer.render(QUESTION, add_generation_prompt=True)
    (request,) = engine.requests
    assert request.prompt_ids == turn.prompt_ids == prompt.token_ids
    assert request.model == "tiny"
    assert {name: getattr(request, name) for name in options} == options
    assert request.vocab_size == renderer.vocab_size
    assert request.sampling_params == {
        "temperature": 0.5,
        "max_tokens": 1001 - len(prompt),
        "stop_token_ids": renderer.get_stop_token_ids(),
    }
    assert (turn.content, turn.reasoning_content, turn.tool_calls) == ("A cow.", None, ())
    assert (turn.message.role, turn.message.content) == ("assistant", "A cow.")
    assert (turn.finish_reason, turn.usage) == ("stop", Usage(len(prompt), len(turn.completion_ids), 3))
    assert (turn.logprobs, turn.prompt_attribution) == ([-0.5] * len(turn.completion_ids), prompt)
    assert not turn.multi_modal_data
    # What was given is the caller's, though the renderer remembers what it rendered.
    turn.prompt_ids.append(0)
    assert renderer.render(QUESTION, add_generation_prompt=True) == prompt
    # The message is ready to go on with, and the turn is pickled.
    renderer.render([*QUESTION, turn.message, *QUESTION], add_generation_prompt=True)
    turn = run(renderer, engine, messages=WITH_PHOTO)
    copy = pickle.loads(pickle.dumps(turn))
    assert (copy.message, copy.prompt_ids) == (turn.message, turn.prompt_ids)
    assert copy.multi_modal_data.mm_hashes == turn.multi_modal_data.mm_hashes


def test_images_come_with_ranges_and_what_the_template_wrote(renderer):
    engine = Scripted()
    turn = run(renderer, engine, messages=WITH_PHOTO)
    (request,) = engine.requests
    (found,) = request.multi_modal_data.mm_placeholders["image"]
    pad = renderer.tokenizer.token_id("<|image_pad|>")
    assert collapse(request.prompt_ids, request.multi_modal_data, request.placeholder_ids) == [
        *request.prompt_ids[: found.offset],
        pad,
        *request.prompt_ids[found.offset + found.length :],
    ]
    assert request.media_token_ids == {"<|image_pad|>": pad}
    assert turn.multi_modal_data is request.multi_modal_data


def test_a_pool_renders_and_reads_off_the_loop(renderer):
    engine = saying(renderer, "A cow.")
    with RendererPool(renderer, workers=1) as pool:
        turn = run(pool, engine, messages=WITH_PHOTO)
    assert turn.content == "A cow."
    assert engine.requests[0].vocab_size == renderer.vocab_size


def test_tools_and_template_arguments_reach_the_template_and_the_parser(renderer):
    turn = run(renderer, saying(renderer, call(1)), tools=TOOLS, template_arguments={"add_vision_id": True})
    prompt = renderer.render(QUESTION, tools=TOOLS, add_generation_prompt=True, add_vision_id=True)
    assert turn.prompt_ids == prompt.token_ids
    (made,) = turn.tool_calls
    assert (made.status, made.name, made.arguments) == ("ok", "look", {"at": 1})
    assert turn.message.tool_calls[0].name == "look"


DOCUMENTED = """{%- for document in documents or [] %}{{ document.text }}{% endfor -%}
{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""


def test_options_of_the_rendering_reach_it(tiny_model):
    """Documents, and a turn that the model goes on with."""
    renderer = Renderer.from_pretrained(tiny_model, image_backend="pil", chat_template=DOCUMENTED)
    answer = assistant("It is a")
    options = {"documents": [{"text": "Cows say moo."}]}
    for messages, flags in (
        (QUESTION, {"add_generation_prompt": True}),
        ([*QUESTION, answer], {"continue_final_message": True}),
    ):
        given = {name: value for name, value in flags.items() if name != "add_generation_prompt"}
        turn = run(renderer, saying(renderer, " cow."), messages=messages, **given, **options)
        assert turn.prompt_attribution == renderer.render(messages, **flags, **options)
        assert turn.content == " cow."
    assert turn.prompt_attribution.text.endswith("assistant\nIt is a")
    assert not turn.prompt_attribution.sampled_mask.any()
    # The turn that was gone on with is bridged from as any other.
    ids = turn.prompt_ids, turn.completion_ids
    bridged = renderer.bridge_to_next_turn(*ids, QUESTION)
    whole = [*QUESTION, {**answer, "content": "It is a cow."}, *QUESTION]
    assert bridged.token_ids == renderer.render_ids(whole, add_generation_prompt=True, **options)


@pytest.mark.parametrize(
    ("words", "reason", "finish"),
    [
        (call(1), "stop", "tool_calls"),
        (call(1), "length", "length"),
        (call(1), "abort", "abort"),
        ("no call", "stop", "stop"),
        ('<tool_call>\n{"name": "look", "argu\n</tool_call>', "stop", "stop"),
        ('<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>', "stop", "stop"),
    ],
    ids=["call", "call cut off", "call aborted", "none", "malformed", "unknown tool"],
)
def test_only_a_well_formed_call_that_stopped_is_tool_calls(renderer, words, reason, finish):
    assert run(renderer, saying(renderer, words, reason), tools=TOOLS).finish_reason == finish


def test_what_the_engine_says_besides_is_passed_on(renderer):
    experts = RoutedExperts(np.zeros((3, 2, 1), np.uint8))
    spans = (WeightVersionSpan("7", 0, 2),)
    engine = Scripted(extra={"routed_experts": experts, "weight_versions": spans})
    turn = run(renderer, engine, routed_experts_prompt_start=4)
    assert turn.routed_experts is experts
    assert turn.weight_versions is spans
    run(renderer, engine, routed_experts=True)
    run(renderer, engine)
    asked = [(each.routed_experts, each.routed_experts_prompt_start) for each in engine.requests]
    assert asked == [(True, 4), (True, None), (False, None)]
    assert len({each.request_id for each in engine.requests}) == 3


def test_a_bridge_goes_on_with_its_sidecar_and_attribution(renderer):
    engine = saying(renderer, "A gradient.")
    first = run(renderer, engine, messages=WITH_PHOTO)
    bridged = renderer.bridge_to_next_turn(
        first.prompt_ids, first.completion_ids, QUESTION, previous_multi_modal_data=first.multi_modal_data
    )
    second = run(renderer, engine, messages=None, prompt_attribution=bridged)
    assert second.prompt_ids == bridged.token_ids
    assert second.prompt_attribution is bridged
    assert engine.requests[1].multi_modal_data is bridged.multi_modal_data
    given = {"prompt_ids": np.array(bridged.token_ids), "multi_modal_data": bridged.multi_modal_data}
    third = run(renderer, engine, **given)
    assert third.prompt_ids == bridged.token_ids
    assert all(type(token) is int for token in third.prompt_ids)
    assert third.prompt_attribution is None


OWN = EngineResponse([5, 6], [-0.5, -0.5], "stop", Usage(3, 2))


@pytest.mark.parametrize(
    "response",
    [
        {"completion_ids": [5, 6]},
        replace(OWN, completion_ids=np.array([5, 6])),
        replace(OWN, logprobs=None),
        replace(OWN, logprobs=[-9999.0, 0.0]),
        replace(OWN, completion_ids=[5] * 9, logprobs=[-0.5] * 9),
        replace(OWN, finish_reason="done"),
    ],
    ids=["form", "ids", "no logprobs", "sentinel", "budget", "reason"],
)
def test_the_response_of_an_engine_of_ones_own_is_checked_as_a_servers(renderer, sentence, response):
    class Own(Scripted):
        async def generate(self, request, transport, *, on_tokens=None):
            return response

    options = {"sampling_params": {"max_tokens": 8}}
    assert str(refused(EngineReplyError, renderer, Own(), **options)) == sentence

    class First(ScriptedEngine):
        async def complete(self, request, **options):
            self.asked.append(request)
            return response

    engines = First("first"), ScriptedEngine("second")
    own = Own()
    own.transport = "http://127.0.0.1:1"  # taken as the `client` is
    assert raised(EngineReplyError, run, renderer, own, client=None, **options)
    client = InferenceEngineClient(engines, **patient(attempt_timeout=None))
    (ids,) = asyncio.run(client.generate({"prompt_token_ids": [[1]], **options}))["response_ids"]
    assert len(ids) == len(engines[1].asked) * 8 == 8
    assert engines[0].asked


def test_prompts_that_are_refused(renderer, sentence):
    prompt = renderer.render(WITH_PHOTO, add_generation_prompt=True)
    (found,) = prompt.multi_modal_data.mm_placeholders["image"]
    pad = prompt.token_ids[found.offset]
    engine = Scripted()
    assert str(refused(PlaceholderError, renderer, engine, prompt_ids=prompt.token_ids)) == sentence
    assert not engine.requests
    run(renderer, engine, prompt_ids=[1, pad, 2], multi_modal_data=MultiModalData())
    assert engine.requests[0].prompt_ids == [1, pad, 2]
    prompt = renderer.render(QUESTION, add_generation_prompt=True)
    other = {"prompt_ids": prompt.token_ids[1:], "prompt_attribution": prompt}
    assert str(refused(InputError, renderer, **other)) == sentence
    assert str(refused(InputError, renderer, messages=None)) == sentence
    assert str(refused(InputError, renderer, cache_salts="x")) == sentence


def test_a_long_prompt_is_refused_before_it_is_sent_by_the_callers_limit_first(renderer, sentence):
    length = len(renderer.render(QUESTION, add_generation_prompt=True))
    engine = Scripted(limit=length - 1)
    error = refused(PromptTooLongError, renderer, engine)
    assert (error.prompt_len, error.max_prompt_len) == (length, length - 1)
    assert str(error) == sentence
    assert not engine.requests
    forget(engine.server)
    engine.limit, engine.completion = length, [5]
    assert run(renderer, engine).prompt_ids
    assert engine.requests[0].sampling_params["max_tokens"] == 1
    engine = Scripted(limit=5)
    run(renderer, engine, max_prompt_len=500)
    assert engine.asked_limit == 0
    assert engine.requests[0].sampling_params["max_tokens"] == DEFAULT_MAX_TOKENS
    refused(PromptTooLongError, renderer, engine, max_prompt_len=3)


@pytest.mark.parametrize("limit", [None, EngineStatusError("forbidden", status=403), EngineReplyError("odd")])
def test_without_a_limit_the_engine_decides(renderer, limit, caplog):
    engine = Scripted(limit=limit)
    asked = Engine(engine, engine.server, model="tiny", renderer=renderer)

    async def turns():
        await asyncio.gather(*(asked.turn(asked.prompt([1], MultiModalData())) for _ in range(3)))

    with caplog.at_level(logging.WARNING, "mmrender.client"):
        asyncio.run(turns())
    assert engine.requests[0].sampling_params["max_tokens"] == DEFAULT_MAX_TOKENS
    assert caplog.text.count("not checked for length") == (
        limit is not None
    )  # once for all that asked together


def test_the_engines_overflow_reply_is_the_same_error(renderer):
    length = len(renderer.render(QUESTION, add_generation_prompt=True))
    said = EngineStatusError("no", status=400, body="too long")
    error = refused(PromptTooLongError, renderer, Scripted(error=said))
    assert (error.prompt_len, error.max_prompt_len) == (length, 1000)
    assert error.__cause__ is said
    for other in (EngineStatusError("no", status=400, body="broken"), PromptTooLongError(7, 6)):
        assert refused(type(other), renderer, Scripted(error=other)) is other


def test_stop_tokens_are_the_models_and_the_callers(renderer):
    engine = Scripted()
    own = renderer.get_stop_token_ids()
    run(renderer, engine, sampling_params={"stop_token_ids": [9], "max_tokens": 4})
    assert engine.requests[0].sampling_params == {"stop_token_ids": [9, *own], "max_tokens": 4}
    assert engine.requests[0].eos_token_ids == own
    run(renderer, engine, sampling_params={"ignore_eos": True, "max_tokens": 4})
    assert engine.requests[1].sampling_params == {"ignore_eos": True, "max_tokens": 4}
    run(renderer, engine, sampling_params={"stop_token_ids": "abc", "max_tokens": 4})
    assert engine.requests[2].sampling_params["stop_token_ids"] == "abc"  # for the backend to refuse by name


async def test_cancelling_reaches_the_engine(renderer):
    engine = Scripted(gate=asyncio.Event())
    given = {"messages": QUESTION, "model": "tiny", "backend": engine}
    task = asyncio.create_task(generate(client=engine.server, renderer=renderer, **given))
    while not engine.requests:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert engine.cancelled == 1


def test_backends_have_names(sentence):
    for backend, name in ((None, "vllm"), ("sglang", "sglang"), ("dynamo", "dynamo")):
        found = resolve_backend(backend, "tiny")
        assert found.name == name
        assert resolve_backend(backend, "tiny") is resolve_backend(found, "tiny") is found
    assert error_of(InputError, resolve_backend, "vlm", "tiny") == sentence


def test_a_model_in_this_process_needs_no_server(renderer, tiny_model):
    given = {"messages": WITH_PHOTO, "sampling_params": {"max_tokens": 6, "seed": 3}}
    named = run(renderer, "local", model=str(tiny_model), **given)
    made = run(renderer, LocalBackend(tiny_model), client=None, **given)
    assert named.completion_ids == made.completion_ids
    assert len(named.logprobs) == len(named.completion_ids) > 0
    assert named.usage.prompt_tokens == len(named.prompt_ids)
