"""openai-agents over chat completions or responses, with a picture in a tool result.

With `stateful` a call of responses names the response before, and has the new items alone.
"""

import asyncio
import base64
import sys
from pathlib import Path

import openai
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    ToolOutputImage,
    function_tool,
    set_tracing_disabled,
)

base_url, key, folder, protocol, *how = sys.argv[1:]
set_tracing_disabled(True)
data = base64.b64encode(Path(folder, "pic.png").read_bytes()).decode()
URL = f"data:image/png;base64,{data}"


@function_tool
def note(text: str) -> str:
    """Take a note."""
    return f"noted {text}"


@function_tool
def look(at: str):
    """Look at a picture."""
    return ToolOutputImage(image_url=URL) if protocol == "responses" else f"see {at}"


async def main() -> None:
    client = openai.AsyncOpenAI(base_url=base_url, api_key=key)
    kind = OpenAIResponsesModel if protocol == "responses" else OpenAIChatCompletionsModel
    agent = Agent(
        name="looker",
        instructions="You look at pictures and take notes.",
        tools=[note, look],
        model=kind("any", openai_client=client),
    )
    asked = [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "How many legs has the animal?"},
                {"type": "input_image", "image_url": URL, "detail": "auto"},
            ],
        }
    ]
    names_response = how == ["stateful"]
    streamed = Runner.run_streamed(agent, asked, max_turns=12, auto_previous_response_id=names_response)
    async for _ in streamed.stream_events():
        pass
    print(streamed.final_output)


asyncio.run(main())
