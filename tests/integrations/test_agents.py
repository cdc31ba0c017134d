"""OpenAI's Agents SDK through the endpoint: a picture in, a tool called, an answer out."""

import asyncio

import openai
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

from kit import data_url, noise
from mmrender.client.types import EngineResponse, Usage
from mmrender.engines import EngineServer, InferenceEngineClient, ServerSettings
from mmrender.testing.scripted_engine import ScriptedEngine

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 3}}\n</tool_call>'
ANSWER = "It is a cow."


class Says(ScriptedEngine):
    """Calls the tool, and answers once there is a result."""

    def __init__(self, renderer):
        super().__init__("says")
        self.renderer = renderer

    async def complete(self, request, *, session_id=None, on_tokens=None):
        self.asked.append(request)
        said = ANSWER if "<tool_response>" in self.renderer.decode(request.prompt_ids) else CALL
        ids = [*self.renderer.tokenizer.encode(said), self.renderer.get_stop_token_ids()[0]]
        if on_tokens is not None:
            for token in ids:
                on_tokens([token], [-0.5], None)
        return EngineResponse(ids, [-0.5] * len(ids), "stop", Usage(len(request.prompt_ids), len(ids)))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_an_agent_sees_a_picture_and_calls_a_tool(renderer, streamed):
    picture = noise(3, 90, 70)
    url = data_url(picture)
    looked = []

    @function_tool
    def look(at: int) -> str:
        """Look closer."""
        looked.append(at)
        return "four legs"

    async def run(base_url):
        set_tracing_disabled(True)
        async with openai.AsyncOpenAI(base_url=base_url, api_key="secret", max_retries=0) as caller:
            model = OpenAIChatCompletionsModel("m", openai_client=caller)
            settings = ModelSettings(max_tokens=64)
            agent = Agent(
                name="a", instructions="Be brief.", tools=[look], model=model, model_settings=settings
            )
            parts = [
                {"type": "input_text", "text": "What is it?"},
                {"type": "input_image", "image_url": url, "detail": "auto"},
            ]
            asked = [{"role": "user", "content": parts}]
            if not streamed:
                return (await Runner.run(agent, asked)).final_output
            result = Runner.run_streamed(agent, asked)
            async for _ in result.stream_events():
                pass
            return result.final_output

    engine = Says(renderer)
    client = InferenceEngineClient([engine], renderer=renderer)
    with EngineServer(client, ServerSettings(model="m", api_key="secret")) as server:
        assert asyncio.run(run(f"{server.url}/v1")) == ANSWER
    assert looked == [3]
    first, second = engine.asked
    shown = renderer.render([{"role": "user", "content": [{"type": "image", "image": picture}]}])
    for request in (first, second):
        assert request.multi_modal_data.mm_hashes == shown.multi_modal_data.mm_hashes
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    assert "four legs" in renderer.decode(second.prompt_ids)
