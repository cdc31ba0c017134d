"""The protocols of agents by name, and the sentence about a prompt that is too long."""

from collections.abc import Mapping
from typing import Final

from mmrender.errors import PromptTooLongError
from mmrender.gateway.call import AgentProtocol, ProtocolName
from mmrender.gateway.chat import Chat
from mmrender.gateway.messages import Messages
from mmrender.gateway.responses import Responses

PROTOCOLS: Final[Mapping[ProtocolName, AgentProtocol]] = {
    "chat": Chat(),
    "responses": Responses(),
    "messages": Messages(),
}
"""One value for each protocol, which any number of requests share."""


def too_long(error: PromptTooLongError) -> str:
    """Return the sentence for a prompt that is too long, from which harnesses know that they must compact."""
    length = "more" if error.prompt_len is None else str(error.prompt_len)
    limit = "the" if error.max_prompt_len is None else str(error.max_prompt_len)
    return f"prompt is too long: {length} tokens > {limit} maximum"
