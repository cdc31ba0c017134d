"""smolagents' agent that calls tools, with a picture in the task."""

import sys
from pathlib import Path

from PIL import Image
from smolagents import OpenAIServerModel, ToolCallingAgent, tool

base_url, key, folder = sys.argv[1:]


@tool
def note(text: str) -> str:
    """Take a note.

    Args:
        text: The note.
    """
    return f"noted {text}"


@tool
def look(at: str) -> str:
    """Look at a part of the picture.

    Args:
        at: The part.
    """
    return f"see {at}"


agent = ToolCallingAgent([note, look], OpenAIServerModel("any", api_base=base_url, api_key=key), max_steps=12)
print(agent.run("How many legs has the animal?", images=[Image.open(Path(folder, "pic.png"))]))
