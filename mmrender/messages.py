"""Canonical messages, the request to render them, and the shapes that callers may pass as dicts.

Canonical types are frozen and strict. `mmrender.content` builds them from the messages of OpenAI and Hugging
Face users. The typed dicts tell type checkers the usual keys.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, NamedTuple, Required, TypeAlias, TypedDict, get_args

import msgspec

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = get_args(Role)

Modality: TypeAlias = Literal["image", "video", "audio"]
MODALITIES: tuple[Modality, ...] = get_args(Modality)


class _UnknownSource:
    """Marks a medium whose content is unknown (probes only)."""

    def __repr__(self) -> str:
        return "UNKNOWN_SOURCE"

    def __reduce__(self) -> str:
        return "UNKNOWN_SOURCE"


UNKNOWN_SOURCE: Final = _UnknownSource()
"""Source of a media part in probes, which renders as one unexpanded placeholder."""


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """Text, exactly as the caller wrote it."""

    text: str


class MediaPart(msgspec.Struct, frozen=True, tag_field="type"):
    """A medium among the content parts. Each modality has a subclass."""

    modality: ClassVar[Modality]
    source: Any


class ImagePart(MediaPart, frozen=True, tag="image"):
    """One image.

    `source` is a `PIL.Image.Image`, a numpy array, `bytes`, a `pathlib.Path`, or a `str` (a `data:`,
    `http(s):` or `file:` URL, or a path). `None` takes a source from `images=`. Rendering refuses a part
    without a source.
    """

    modality: ClassVar[Modality] = "image"


class AudioPart(MediaPart, frozen=True, tag="audio"):
    """One audio clip.

    Attributes:
        source: Encoded audio as `bytes`, a `pathlib.Path` or a `str` (a `data:`, `http(s):` or `file:` URL,
            or a path). Or samples as a numpy array or torch tensor, `(samples,)`, `(channels, samples)` or
            `(samples, channels)`, of floats in -1..1 or of int16 or int32 levels.
        sampling_rate: Samples per second of an array. Encoded audio contains its own rate.
    """

    modality: ClassVar[Modality] = "audio"
    sampling_rate: int | None = None


class VideoPart(MediaPart, frozen=True, tag="video"):
    """One video.

    Frames with `times` or `frames_indices` are used without further sampling. Otherwise the model's settings
    decide which frames are sampled. An encoded video contains its times.

    Attributes:
        source: A sequence of frames, each as `ImagePart.source`, or a uint8 array or torch tensor
            `(frames, height, width, 3)`, or an encoded video as `bytes`, a `pathlib.Path` or a `str`.
        fps: Frame rate of the source video.
        times: Time of each frame, in seconds.
        frames_indices: Index of each frame in the source video.
        total_num_frames: Number of frames of the source video.
        duration: Duration of the source video, in seconds.
        sound: The sound track, for a renderer that renders sound tracks. An encoded video may contain one.
    """

    modality: ClassVar[Modality] = "video"
    fps: float | None = None
    times: tuple[float, ...] | None = None
    frames_indices: tuple[int, ...] | None = None
    total_num_frames: int | None = None
    duration: float | None = None
    sound: AudioPart | None = None


class ThinkingPart(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """A reasoning block among the content parts."""

    thinking: str


Part: TypeAlias = TextPart | ImagePart | VideoPart | AudioPart | ThinkingPart

UNKNOWN_PARTS: Final[Mapping[Modality, ImagePart | VideoPart | AudioPart]] = {
    "image": ImagePart(UNKNOWN_SOURCE),
    "video": VideoPart(UNKNOWN_SOURCE),
    "audio": AudioPart(UNKNOWN_SOURCE),
}
"""A part of each modality without a known source (probes only)."""


def text_of(content: str | Iterable[Part] | None) -> str:
    """Return the text of content, its parts joined, without reasoning."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join([part.text for part in content if isinstance(part, TextPart)])


class ToolCall(msgspec.Struct, frozen=True):
    """One call of a tool by the assistant, with its arguments parsed."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation.

    `content` keeps its shape, since templates treat a string and a list of parts differently. `extra` holds
    keys that are not part of any standard. The template sees them under their own names.
    """

    role: Role
    content: str | tuple[Part, ...] | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    tool_call_id: str | None = None
    extra: Mapping[str, Any] = {}

    def media(self) -> Iterator[tuple[int, MediaPart]]:
        """Yield `(index in content, part)` for each media part, in order."""
        if isinstance(self.content, tuple):
            for index, part in enumerate(self.content):
                if isinstance(part, MediaPart):
                    yield index, part

    @property
    def text(self) -> str:
        """The text of the content, its parts joined, without reasoning."""
        return text_of(self.content)

    @property
    def reasoning(self) -> str:
        """`reasoning_content`, then the reasoning among the content parts."""
        parts = self.content if isinstance(self.content, tuple) else ()
        thoughts = [part.thinking for part in parts if isinstance(part, ThinkingPart)]
        return "".join([self.reasoning_content or "", *thoughts])

    @property
    def has_text(self) -> bool:
        """Whether the content holds text other than blanks."""
        return bool(self.text.strip())


class RequestMedia(NamedTuple):
    """A media part of a request.

    Attributes:
        path: Its path, such as `messages[1].content[0]`, for errors.
        message: Index of its message.
        position: Index in the message's content.
        role: Role of the message.
        part: The part.
        fingerprint: Key of its source, or None if the source may change.
    """

    path: str
    message: int
    position: int
    role: Role
    part: MediaPart
    fingerprint: Hashable | None


class RenderRequest(msgspec.Struct, frozen=True):
    """A conversation and everything else that its rendering depends on.

    `mmrender.content.messages.read_request` makes and checks it. Every later stage takes it whole.

    Attributes:
        messages: The conversation.
        media: Its media parts, in order. Empty if only text is rendered.
        tools: Tool definitions, as the template prints them. None and an empty list differ to a template.
        documents: Documents for templates that take them.
        add_generation_prompt: Whether the text ends with the opening of the assistant's turn.
        continued: Field of the last message that the text ends with, such as `"content"`, or None.
        variables: Further template variables, such as `enable_thinking`.
        where: Name of the messages in errors.
    """

    messages: Sequence[Message]
    media: tuple[RequestMedia, ...] = ()
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = False
    continued: str | None = None
    variables: Mapping[str, Any] = {}
    where: str = "messages"

    def prompt_after(self, messages: Sequence[Message]) -> "RenderRequest":
        """Return the request for the prompt after other messages."""
        return msgspec.structs.replace(
            self, messages=messages, media=(), add_generation_prompt=True, continued=None
        )


class FunctionCallDict(TypedDict, total=False):
    """The `function` of a tool call; `arguments` is a mapping or its JSON text."""

    name: Required[str]
    arguments: Mapping[str, Any] | str


class ToolCallDict(TypedDict, total=False):
    """A tool call as OpenAI spells it, or with `name` and `arguments` at the top."""

    id: str | None
    type: str
    function: FunctionCallDict
    name: str
    arguments: Mapping[str, Any] | str


class ContentPartDict(TypedDict, total=False):
    """A part of a content list, in the spellings of OpenAI and Hugging Face."""

    type: Required[str]
    text: str
    image: Any
    image_url: Any
    source: Any
    video: Any
    video_url: Any
    video_metadata: Mapping[str, Any]
    fps: float
    times: Sequence[float]
    audio: Any
    audio_url: Any
    input_audio: Any
    sampling_rate: int
    thinking: str


class MessageDict(TypedDict, total=False):
    """A message as OpenAI and Hugging Face users write it."""

    role: Required[str]
    content: str | Sequence[ContentPartDict | Part | str] | None
    reasoning_content: str | None
    tool_calls: Sequence[ToolCallDict | ToolCall] | None
    name: str | None
    tool_call_id: str | None


MessageLike: TypeAlias = Message | MessageDict | Mapping[str, Any]
"""A message as callers may pass it: canonical, a typed dict, or any mapping with the same keys."""
