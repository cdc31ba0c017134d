"""The one tolerant place: what OpenAI and Hugging Face users pass in, canonical messages out.

Everything after it is strict. What cannot be read is refused with a `MessageError` that names its path;
nothing is dropped in silence. `docs/messages.md` lists what is accepted.
"""

from mmrender.content.messages import normalize_message, normalize_messages, to_openai
from mmrender.content.parts import IGNORED_KEYS, PART_TYPES, attach_media, normalize_content, normalize_part
from mmrender.content.tools import normalize_tools, parse_arguments

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
