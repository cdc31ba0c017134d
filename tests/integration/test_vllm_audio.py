"""A real vLLM with a tiny model of audio: four turns with a clip in each tool result, and the local forward."""

import numpy as np
import pytest

from audio_cases import asked, clip, heard, logprobs_of, qwen2_audio, qwen2_audio_model
from integration.engine_checks import MODEL, bridged, connected
from integration.engine_server import needs_tier, start_vllm
from mmrender import Renderer, generate
from mmrender.client.vllm_images import GENERATE_PATH
from mmrender.errors import EngineMismatchError

pytestmark = needs_tier("vllm")

SECONDS = (0.4, 1.1, 2.5, 3.9)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = qwen2_audio(tmp_path_factory.mktemp("audio") / "model", seconds=30)
    renderer = Renderer.from_pretrained(folder)
    model = qwen2_audio_model(renderer, seconds=30)
    model.save_pretrained(folder)
    log = tmp_path_factory.mktemp("server") / "server.log"
    with start_vllm(folder, log=log) as server:
        yield server, Renderer.from_pretrained(folder), model


class Watched:
    """A transport that keeps the features of each request for tokens."""

    def __init__(self, inner):
        self._inner, self.features = inner, []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    async def request(self, method, path, **options):
        if path == GENERATE_PATH:
            self.features.append(options["json"].get("features"))
        return await self._inner.request(method, path, **options)


def test_four_turns_with_a_clip_in_each_tool_result(parts):
    server, renderer, model = parts
    marks = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
    bias = {renderer.tokenizer.token_id(name): -100.0 for name in marks}
    sampling = {"temperature": 1.0, "seed": 3, "max_tokens": 12, "logit_bias": bias}

    async def work(way):
        rendered = renderer.render([asked("Listen to the tool.")], add_generation_prompt=True)
        turns = []
        for number, seconds in enumerate(SECONDS):
            call = {"client": way, "renderer": renderer, "model": MODEL, "sampling_params": sampling}
            last = await generate(**call, prompt_attribution=rendered)
            heard_by_tool = heard(clip(seconds, number, 22_050), 22_050)
            content = [{"type": "text", "text": f"Recording {number}:"}, heard_by_tool]
            rendered = bridged(renderer, last, {"role": "tool", "content": content})
            turns.append(await generate(**call, prompt_attribution=rendered))
            rendered = bridged(renderer, turns[-1], asked("Go on."))
        return turns, way

    turns, way = connected(server, work, Watched)
    assert [len(turn.multi_modal_data.spans()) for turn in turns] == [1, 2, 3, 4]
    for turn in turns:
        np.testing.assert_allclose(turn.logprobs, logprobs_of(model, turn), rtol=0, atol=1e-3)
        assert np.abs(turn.logprobs - logprobs_of(model, turn, is_muted=True)).max() > 0.01
    left_out = [data is None for data in way.features[-1]["kwargs_data"]["audio"]]
    assert left_out == [True, True, True, False]  # the server has the clips of earlier turns


def test_a_renderer_with_another_extractor_is_refused(parts, tmp_path):
    server, _, _ = parts
    renderer = Renderer.from_pretrained(qwen2_audio(tmp_path / "other", seconds=4))
    messages = [asked("Listen.", heard(clip(0.5)))]
    call = {"renderer": renderer, "model": MODEL, "messages": messages, "sampling_params": {"max_tokens": 2}}
    with pytest.raises(EngineMismatchError, match="processes an audio clip differently"):
        connected(server, lambda way: generate(client=way, **call))
    assert server.get("/v1/models")["data"]
