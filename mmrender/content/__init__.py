"""The one tolerant place: what OpenAI and Hugging Face users pass in, canonical messages out.

Everything after it is strict. What cannot be read is refused with a `MessageError` that names its path;
nothing is dropped in silence. `docs/messages.md` lists what is accepted.
"""

from mmrender.content.attach import attach_media
from mmrender.content.calls import parse_arguments
from mmrender.content.conversation import normalize_message, normalize_messages
from mmrender.content.openai import to_openai
from mmrender.content.parts import IGNORED_KEYS, PART_TYPES, normalize_content, normalize_part
from mmrender.content.tools import normalize_tools

__all__ = [
    "IGNORED_KEYS",
    "PART_TYPES",
    "attach_media",
    "normalize_content",
    "normalize_message",
    "normalize_messages",
    "normalize_part",
    "normalize_tools",
    "parse_arguments",
    "to_openai",
]
