from .gateway import Gateway as Gateway
from .session import Session as Session
from .settings import GatewaySettings as GatewaySettings
