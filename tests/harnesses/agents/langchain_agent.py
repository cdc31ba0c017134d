"""langchain's agent over chat completions or responses, with a picture in a tool result."""

import base64
import sys
from pathlib import Path

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

base_url, key, folder, protocol = sys.argv[1:]
data = base64.b64encode(Path(folder, "pic.png").read_bytes()).decode()
shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


@tool
def note(text: str) -> str:
    """Take a note."""
    return f"noted {text}"


@tool
def look(at: str) -> list:
    """Look at a picture."""
    return [{"type": "text", "text": f"see {at}"}, shown]


model = ChatOpenAI(
    model="any", base_url=base_url, api_key=key, use_responses_api=protocol == "responses", max_retries=0
)
agent = create_agent(model, [note, look], system_prompt="You look at pictures and take notes.")
asked = [{"role": "user", "content": [{"type": "text", "text": "How many legs has the animal?"}, shown]}]
result = agent.invoke({"messages": asked}, {"recursion_limit": 40})
print(result["messages"][-1].content)
