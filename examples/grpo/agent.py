"""An agent that knows the client of OpenAI alone: it asks, calls the tools that it has, and answers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import openai

Parts = Sequence[Mapping[str, Any]]
"""Texts and pictures of a message, the pictures as `data:` URLs."""


class Agent:
    """Answers questions about pictures, one conversation a question."""

    def __init__(self) -> None:
        # Its own limit for a connection is 5 s, which a machine that also samples and trains may exceed.
        self.client = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", timeout=3600.0)

    async def answer(
        self,
        base_url: str,
        api_key: str,
        question: Parts,
        tools: Sequence[Mapping[str, Any]] | None,
        call_tool: Callable[[str, str], Parts],
    ) -> str:
        """Return the model's answer, which it may look for with tools."""
        # All conversations share the connections of one client, which takes 20 ms to make.
        client = self.client.with_options(base_url=base_url, api_key=api_key)
        messages: list[Any] = [{"role": "user", "content": question}]
        offered: Any = {"tools": tools} if tools else {}
        while True:
            reply = await client.chat.completions.create(model="any", messages=messages, **offered)
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return message.content or ""
            for call in message.tool_calls:
                if call.type == "function":
                    result = call_tool(call.function.name, call.function.arguments)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
