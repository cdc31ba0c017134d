"""The protocols of agents, by name."""

from collections.abc import Mapping
from typing import Final

from mmrender.gateway.call import ProtocolName
from mmrender.gateway.chat import Chat
from mmrender.gateway.messages import Messages
from mmrender.gateway.responses import Responses
from mmrender.gateway.writing import AgentProtocol

PROTOCOLS: Final[Mapping[ProtocolName, AgentProtocol]] = {
    "chat": Chat(),
    "responses": Responses(),
    "messages": Messages(),
}
"""One value for each protocol, which any number of requests share."""
