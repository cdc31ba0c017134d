from .messages import normalize_messages as normalize_messages
from .tools import normalize_tools as normalize_tools
