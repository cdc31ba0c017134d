"""A loop of 40 lines around the openai client, with a tool that returns text and one that shows a picture."""

import base64
import json
import sys
from pathlib import Path

import openai

base_url, key, folder = sys.argv[1:]
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"The tool {name}.", "parameters": schema}}
    for name, schema in {
        "note": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
        "look": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    }.items()
]
picture = base64.b64encode(Path(folder, "pic.png").read_bytes()).decode()
shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
messages = [
    {"role": "system", "content": "You look at pictures and take notes."},
    {"role": "user", "content": [{"type": "text", "text": "How many legs has the animal?"}, shown]},
]
client = openai.OpenAI(base_url=base_url, api_key=key)
for _ in range(12):
    reply = client.chat.completions.create(model="any", messages=messages, tools=TOOLS, max_tokens=512)
    message = reply.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    if not message.tool_calls:
        print(message.content)
        break
    pictures = []
    for call in message.tool_calls:
        arguments = json.loads(call.function.arguments)
        text = f"noted {arguments.get('text')}" if call.function.name == "note" else f"see {arguments['at']}"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
        if call.function.name == "look":
            pictures.append(shown)
    if pictures:
        messages.append({"role": "user", "content": pictures})
