from .messages import normalize_messages as normalize_messages
from .messages import to_openai as to_openai
from .parts import attach_media as attach_media
from .tools import normalize_tools as normalize_tools
