"""`trust="server"`: a server's own widening of images is the prompt, from the reply to the trainer."""

import asyncio

import pytest

from mmrender import generate
from mmrender.client.sglang import SGLangBackend
from mmrender.client.vllm import GENERATE_PATH, VLLMBackend
from mmrender.engines import HTTPEngine, InferenceEngineClient
from mmrender.errors import EngineMismatchError, InputError
from mmrender.rollout.client import RendererClient
from mmrender.testing.memory_transport import MemoryTransport
from mmrender.trajectory import Trajectory, load_trajectories, save_trajectories
from rollout_cases import shown, text

WIDTH = 7
"""Tokens of an image at the server; the renderer gives it another number."""
CALL = {"model": "m", "sampling_params": {"max_tokens": 4}}


def user(words, *numbers):
    return {"role": "user", "content": [*map(shown, numbers), text(words)]}


class Server:
    """Widens images by settings of its own, and samples one text; the first calls are aborted in its midst."""

    def __init__(self, renderer, engine, aborts=0):
        self.pad = renderer.tokenizer.token_id("<|image_pad|>")
        self.said = [*renderer.tokenizer.encode("A cow.")[:3], renderer.get_stop_token_ids()[0]]
        self.engine, self.aborts, self.prompts = engine, aborts, []
        answer = self.vllm if engine == "vllm" else self.sglang
        path = GENERATE_PATH if engine == "vllm" else "/generate"
        self.transport = MemoryTransport({f"POST {path}": answer})
        images = {"images": "content_parts"} if engine == "vllm" else {}
        self.backend = (VLLMBackend if engine == "vllm" else SGLangBackend)(**images, trust="server")

    def widened(self, ids):
        prompt, ranges = [], []
        for token in ids:
            if token == self.pad:
                ranges.append({"offset": len(prompt), "length": WIDTH})
            prompt += [token] * (WIDTH if token == self.pad else 1)
        self.prompts.append(prompt)
        return prompt, ranges

    def sampled(self, prompt):
        """Tokens that are left to say, and why they end."""
        done = next((n for n in (3, 2, 1) if prompt[-n:] == self.said[:n]), 0)
        if self.aborts:
            self.aborts -= 1
            return self.said[done : done + 1], "abort"
        return self.said[done:], "stop"

    def vllm(self, asked):
        prompt, ranges = self.widened(asked.json["token_ids"])
        ids, reason = self.sampled(prompt)
        content = [{"token_id": token, "logprob": -0.5} for token in ids]
        choice = {"finish_reason": reason, "token_ids": ids, "logprobs": {"content": content}}
        seen = {"prompt_token_ids": prompt, "mm_placeholders": {"image": ranges}}
        return {"choices": [choice], "usage": {"prompt_tokens": len(prompt)}, **seen}

    def sglang(self, asked):
        prompt, _ = self.widened(asked.json["input_ids"])
        ids, reason = self.sampled(prompt)
        meta = {"finish_reason": {"type": reason}, "output_token_logprobs": [[-0.5, token] for token in ids]}
        return {"output_ids": ids, "prompt_token_ids": prompt, "meta_info": meta}


@pytest.fixture(params=["vllm", "sglang"])
def engine(request):
    return request.param


def test_a_trajectory_remembers_the_servers_prompts(renderer, engine, tmp_path):
    server, trajectory = Server(renderer, engine), Trajectory()
    client = RendererClient(
        renderer, client=server.transport, backend=server.backend, model="m", max_prompt_len=2047
    )

    async def talk():
        opening = [user("Which animals are these?", 1, 2)]
        sampling = {"trajectory": trajectory, "sampling_params": {"max_tokens": 4}}
        first = await client.create_completion(opening, **sampling)
        following = [*opening, first.message, user("And this?", 3)]
        return first, await client.create_completion(following, **sampling)

    first, second = asyncio.run(talk())
    assert first.generation.response.prompt.ids == server.prompts[0]
    assert first.generation.prompt_attribution is None
    assert second.why_rendered is None  # bridged: the server's prompt is what the next one begins with
    save_trajectories(tmp_path / "kept.mmc", [trajectory])
    for known in (trajectory, *load_trajectories(tmp_path / "kept.mmc")):
        assert [step.prompt_ids.tolist() for step in known.steps] == server.prompts
        spans = known.steps[1].multi_modal_data.spans()
        assert [span.range.length for span in spans] == [WIDTH] * 3
        assert all(span.item.served and span.item.source.startswith(b"\x89PNG") for span in spans)
    (sample,) = trajectory.samples()
    assert sample.token_ids.tolist() == [*server.prompts[1], *server.said]


def test_what_an_abort_left_goes_on_behind_the_servers_prompt(renderer, engine):
    server, told = Server(renderer, engine, aborts=2), []
    engines = [HTTPEngine(server.backend, server.transport, model="m")]

    async def ask():
        async with InferenceEngineClient(engines, renderer=renderer) as client:
            call = {**CALL, "renderer": renderer, "backend": client.as_backend(), "max_prompt_len": 2047}
            tell = lambda ids, *_: told.extend(ids)  # noqa: E731
            return await generate(**call, messages=[user("Which is it?", 1)], on_tokens=tell)

    generation = asyncio.run(ask())
    assert (generation.completion_ids, generation.prompt_ids) == (server.said, server.prompts[0])
    assert server.prompts[2] == server.prompts[0] + server.said[:2]
    assert told == server.said


def test_without_trust_the_same_server_is_refused(renderer, engine):
    server = Server(renderer, engine)
    for trusting in (False, True):
        backend = (
            server.backend
            if trusting
            else type(server.backend)(**({"images": "content_parts"} if engine == "vllm" else {}))
        )
        call = {**CALL, "client": server.transport, "renderer": renderer, "backend": backend}
        work = generate(**call, messages=[user("Which is it?", 1)], max_prompt_len=2047)
        if trusting:
            assert asyncio.run(work).prompt_ids == server.prompts[-1]
        else:
            with pytest.raises(EngineMismatchError, match="the server saw another prompt"):
                asyncio.run(work)


def test_only_what_a_server_widens_can_be_trusted():
    with pytest.raises(InputError) as caught:
        VLLMBackend(trust="server")
    assert str(caught.value) == (
        "VLLMBackend.trust: unknown setting of the backend - expected 'renderer', got 'server'. "
        "A server widens images='content_parts' only"
    )
    with pytest.raises(InputError, match="expected 'renderer', 'server'"):
        SGLangBackend(trust="nobody")
