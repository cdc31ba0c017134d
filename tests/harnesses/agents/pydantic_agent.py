"""pydantic-ai over three protocols, with a picture in a tool result."""

import asyncio
import sys
from pathlib import Path

from pydantic_ai import Agent, BinaryContent

base_url, key, folder, protocol = sys.argv[1:]
if protocol == "messages":
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    model = AnthropicModel(
        "any", provider=AnthropicProvider(api_key=key, base_url=base_url.removesuffix("/v1"))
    )
else:
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    kind = OpenAIResponsesModel if protocol == "responses" else OpenAIChatModel
    model = kind("any", provider=OpenAIProvider(base_url=base_url, api_key=key))
agent = Agent(model, system_prompt="You look at pictures and take notes.")
picture = BinaryContent(Path(folder, "pic.png").read_bytes(), media_type="image/png")


@agent.tool_plain
def note(text: str) -> str:
    """Take a note."""
    return f"noted {text}"


@agent.tool_plain
def look(at: str) -> BinaryContent:
    """Look at a picture."""
    return picture


print(asyncio.run(agent.run(["How many legs has the animal?", picture])).output)
