"""Agents over a gateway and a real vLLM: pictures in tool results, and weights reloaded between their calls."""

import asyncio
import os
from pathlib import Path

import numpy as np
import openai
import pytest
import torch

from end_to_end import no_placeholders
from integration.engine_server import needs_tier
from kit import data_url, media_inputs, noise
from mmrender.audit import TrainerModel, audit
from mmrender.engines import HTTPEngine, InferenceEngineClient
from mmrender.gateway import Gateway
from mmrender.model.weights import load_model
from mmrender.testing.tiny_model import build_tiny_model
from mmrender.trajectory import load_trajectories

pytestmark = needs_tier("vllm")

SESSIONS, TURNS = int(os.environ.get("GATEWAY_SESSIONS", "24")), 4
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a part of the screen.",
        "parameters": {
            "type": "object",
            "properties": {"at": {"enum": ["top", "bottom"]}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}
PRESS = {"type": "function", "function": {**LOOK["function"], "name": "press", "description": "Press it."}}
ALLOWED = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "look"}}]}
CHOICES = ["auto", "required", "auto", {"type": "allowed_tools", "allowed_tools": ALLOWED}]
"""By number of the turn."""


async def agent(
    base_url: str, number: int, biases: list[dict[int, float]], middle: asyncio.Event, go_on: asyncio.Event
) -> None:
    """An agent that knows only OpenAI's client: it is made to look, and sees a screenshot in the result.

    An untrained model would spell a call's delimiters letter by letter, so the second of `biases` asks for their
    tokens. The opening one is the likelier, so that a call that is free to come comes at once.
    """
    shown = {"type": "image_url", "image_url": {"url": data_url(noise(number % 10, 96, 64))}}
    messages = [{"role": "user", "content": [{"type": "text", "text": f"Task {number}"}, shown]}]
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", timeout=900) as client:
        for turn in range(TURNS):
            if turn == TURNS // 2:
                middle.set()
                await go_on.wait()
            looks = turn % 2 == 1
            reply = await client.chat.completions.create(
                model="any",
                messages=messages,
                tools=[LOOK, PRESS],
                tool_choice=CHOICES[turn],
                parallel_tool_calls=False,
                max_tokens=400 if looks else 12,
                logit_bias=biases[looks],
            )
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if message.tool_calls:
                assert turn < 3 or message.tool_calls[0].function.name == "look"
                screenshot = {"type": "image_url", "image_url": {"url": data_url(noise(50 + number % 7))}}
                content = [{"type": "text", "text": "see"}, screenshot]
                messages += [
                    {"role": "tool", "tool_call_id": call.id, "content": content}
                    for call in message.tool_calls
                ]
            else:
                assert not looks
                messages.append({"role": "user", "content": "and now?"})


def logprobs_of(model, branch):
    """One forward of a whole branch: row t is of the token t + 1."""
    ids = torch.from_numpy(branch.token_ids.astype(np.int64))[None]
    with torch.inference_mode():
        logits = model(input_ids=ids, **media_inputs(branch.multi_modal_data, len(branch))).logits[0]
    return logits.float().log_softmax(-1).numpy()


@pytest.fixture(scope="module")
def rollouts(vllm_servers, renderer, tiny_model, tmp_path_factory):
    """Trajectories of all sessions, and the models of both versions."""
    folder = tmp_path_factory.mktemp("gateway")
    other = build_tiny_model(folder / "other", seed=1)
    server = vllm_servers.with_flags()

    async def run():
        engines = InferenceEngineClient(
            [HTTPEngine("vllm", server.base_url, model="tiny")], renderer=renderer
        )
        await engines.set_weight_version("first")
        gateway = Gateway(engines, renderer, model="tiny", out=folder / "rollouts.mmr")
        listening = asyncio.Event()
        serving = asyncio.create_task(gateway.serve(started=lambda _: listening.set()))
        await listening.wait()
        plain = no_placeholders(renderer)["logit_bias"]
        opening, closing = (renderer.tokenizer.token_id(name) for name in ("<tool_call>", "</tool_call>"))
        biases = [plain, plain | {opening: 100.0, closing: 50.0}]
        sessions = [
            await gateway.open_session(
                f"agent-{number}", sampling_params={"temperature": 1.0, "seed": number}
            )
            for number in range(SESSIONS)
        ]
        halves = [asyncio.Event() for _ in sessions]
        go_on = asyncio.Event()

        async def reload() -> None:
            for half in halves:
                await half.wait()
            await engines.load_weights(str(other), weight_version="other")
            go_on.set()

        async with asyncio.TaskGroup() as group:
            group.create_task(reload())
            for number, session in enumerate(sessions):
                group.create_task(agent(session.base_url, number, biases, halves[number], go_on))
        for session in sessions:
            await session.finish()
        await engines.load_weights(str(tiny_model), weight_version="first")
        await engines.teardown()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(run())
    models = {
        name: load_model(Path(path), "float32", "cpu", purpose="the test")
        for name, path in (("first", tiny_model), ("other", other))
    }
    return load_trajectories(folder / "rollouts.mmr"), models


def test_an_audit_of_each_version_of_the_weights_is_clean(rollouts, renderer):
    """Each step was sampled by one version, and its tokens are compared with that version alone."""
    trajectories, models = rollouts
    compared = 0
    for name, model in models.items():
        samples = [
            sample
            for trajectory in trajectories
            for sample in trajectory.samples(trains=lambda step, name=name: _version(step) == name)
        ]
        report = audit(samples, TrainerModel(model), decode=renderer.decode)
        print(f"weights {name}: {report.text()[:240]}")
        assert report.ok, report.text()
        assert report.left_out  # calls of a tool that had to be made
        compared += report.tokens
        [other] = models.keys() - {name}
        assert not audit(samples[:3], TrainerModel(models[other]), explain=0).ok
    assert compared > SESSIONS * 12


def _version(step):
    [version] = {span.version for span in step.weight_versions}
    return version


def test_every_later_call_is_bridged_and_no_call_is_lost(rollouts):
    trajectories, _ = rollouts
    assert len(trajectories) == SESSIONS
    for trajectory in trajectories:
        assert trajectory.error is None
        assert len(trajectory) == TURNS
        made = [step.extra["gateway"]["prompt"] for step in trajectory.steps]
        assert made == ["rendered", *["bridged"] * (TURNS - 1)]
        assert len(trajectory.branches()) == 1


def test_log_probabilities_are_the_local_models(rollouts):
    trajectories, models = rollouts
    largest, compared, versions = 0.0, 0, set()
    for trajectory in trajectories:
        [branch] = trajectory.branches()
        rows = {name: logprobs_of(model, branch) for name, model in models.items()}
        for step in trajectory.steps:
            if "structured_outputs" in step.extra["gateway"] or "structure" in step.extra["gateway"]:
                continue  # its log-probabilities are over the tokens that the schema allowed
            start = len(step.prompt_ids)
            for span in step.weight_versions:
                versions.add(span.version)
                positions = np.arange(start + span.start, start + span.stop)
                expected = rows[span.version][positions - 1, branch.token_ids[positions]]
                recorded = step.logprobs[span.start : span.stop]
                largest = max(largest, float(np.abs(expected - recorded).max()))
                compared += len(positions)
    print(f"{compared} tokens, largest difference {largest:.1e}")
    assert versions == {"first", "other"}
    assert compared > SESSIONS * 12
    assert largest < 1e-3
