"""Generated conversations: everything that a template claims to take, and text that is awkward to encode.

One generator serves both the `mmrender parity` command, from a seed, and Hypothesis, from its own source of
randomness, so that both test the same language.
"""

import base64
import io
import random
import wave
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from PIL import Image

from mmrender.errors import InputError
from mmrender.media.load import load_image
from mmrender.media.policy import MediaPolicy
from mmrender.template.profile import TemplateProfile

_PLAIN = (
    "What is in this picture?",
    "Describe it.",
    "x",
    "Answer: 42",
    "The quick brown fox jumps over the lazy dog.",
    "  leading and trailing  ",
    "line one\nline two\n\nline four",
    "\n\nnewlines around\n\n\n",
    "tab\tand\r\nreturn",
    "ünïcödé - naïve café, Ångström e\u0301 \u212b",
    "日本語のテキスト 中文 한국어 ภาษาไทย العربية",
    "emoji 🙂🏳️‍🌈👩‍👩‍👧 zero\u200bwidth",
    '{"json": [1, 2.5, null, true], "nested": {"a": "b"}}',
    "def f(x):\n    return x ** 2  # comment\n",
    "1234567890 3.14159 -1e-9",
    " \n\n\n\n  \n ",
    "\t\t\u00a0no-break\u3000wide\x0b\x0c\r",
    "<b>html &amp; entities</b> \\backslash\\ `code` ${var} {{ not jinja }} {% raw %}",
    "a" * 200,
    "",
    " ",
    "don't can't I'LL we've",
)
_ARGUMENTS: tuple[Any, ...] = (
    "text", "", "two\nlines", 'quoted "text" \\ backslash', "ünï 日本", 0, -7, 3.5, 1e20, True, False, None,
    [], [1, "two", None], {}, {"deep": {"er": [True, 1.5]}},
)  # fmt: skip


Conversation: TypeAlias = tuple[list[dict[str, Any]], dict[str, Any]]
"""Messages in Hugging Face form, and options for `render`."""

_UNASKED = 0.08
"""Share of conversations that grow without asking whether they are accepted."""
_DRAWS = 8
_TOOLS = ("zoom", "search", "run_code")
_ODD_CHARACTERS = " \n\t\r.,:;!<>|[]{}()/\\\"'`_-0aZ\u00e9\u6f22\u0e33\U0001f642\u200d\u0301\uff1c"


@dataclass
class ConversationMaker:
    """Makes conversations that a template takes.

    With `accepts`, messages or an option that it refuses are drawn again, and left out after some draws. So
    unknown limits of a template, such as one call in a turn, are kept. A few conversations are made without
    asking.

    Attributes:
        profile: The findings about the template.
        images: Pictures to choose from. Without any, conversations are text.
        literals: Special tokens to write into content, as text that looks like syntax.
        max_turns: Maximum number of rounds of user and assistant.
        tools: Whether to write tool definitions, calls and results.
        odd: Whether to write rare things: texts as template arguments, an answer to continue, calls without
            content, messages in unusual order, and any characters and special tokens in every place.
        documents: Whether to write documents as well.
        accepts: Whether a conversation can be rendered.
        videos: Parts of videos to choose from. A conversation takes all of them with times, or without.
        equal_frames: Whether all videos of a conversation have the same number of frames.
        clips: Parts of audio to choose from.
    """

    profile: TemplateProfile
    images: Sequence[Image.Image] = ()
    literals: Sequence[str] = ()
    max_turns: int = 4
    tools: bool = True
    odd: bool = False
    documents: bool = False
    accepts: Callable[[Conversation], bool] | None = None
    videos: Sequence[dict[str, Any]] = ()
    equal_frames: bool = False
    clips: Sequence[dict[str, Any]] = ()
    _timed: bool = field(default=False, repr=False)
    _call_ids: int = field(default=0, repr=False)
    _pictured: bool = field(default=True, repr=False)
    _chosen: Sequence[dict[str, Any]] = field(default=(), repr=False)

    def make(self, source: random.Random, *, pictured: bool = True) -> Conversation:
        """Return messages in Hugging Face form, with images if `pictured`, and options for `render`."""
        asks = self.accepts is not None and source.random() >= _UNASKED
        self._pictured = pictured
        self._timed = bool(self.videos) and source.random() < 0.5
        self._chosen = self.videos
        if self.videos and self.equal_frames:
            frames = len(source.choice(self.videos)["video"])
            self._chosen = [video for video in self.videos if len(video["video"]) == frames]
        conversation = self._grown(([], {}), self._rounds(source), asks)
        return self._grown(conversation, self._options(source, conversation[0][-1]), asks)

    def _grown(
        self, conversation: Conversation, steps: Iterable[Callable[[], Conversation]], asks: bool
    ) -> Conversation:
        """Return a conversation with the addition of each step, drawn until it is accepted."""
        for step in steps:
            for _ in range(_DRAWS):
                messages, options = step()
                grown = [*conversation[0], *messages], {**conversation[1], **options}
                if not asks or self.accepts is None or self.accepts(grown):
                    conversation = grown
                    break
            # Without an accepted beginning there would be nothing to compare.
            conversation = conversation if conversation[0] else grown
        return conversation

    def _rounds(self, source: random.Random) -> Iterator[Callable[[], Conversation]]:
        """Yield functions that draw the next messages."""

        def draws(messages: Callable[[random.Random], list[dict[str, Any]]]) -> Callable[[], Conversation]:
            return lambda: (messages(source), {})

        yield draws(self._opening)
        for turn in range(source.randint(1, self.max_turns)):
            if turn or (self.odd and source.random() < 0.05):
                yield draws(self._question)
            if self.tools and "tool" in self.profile.roles and source.random() < 0.4:
                for _ in range(source.randint(1, 2)):
                    yield draws(self._tool_round)
                if self.odd and source.random() < 0.2:
                    continue
            yield draws(lambda source: [self._assistant(source)])
        if source.random() < 0.4:
            yield draws(self._question)

    def _opening(self, source: random.Random) -> list[dict[str, Any]]:
        role = "developer" if self.odd and source.random() < 0.2 else "system"
        is_led = role in self.profile.roles and source.random() < 0.5
        leading = [{"role": role, "content": self._content(source, role)}] if is_led else []
        return [*leading, *self._question(source)]

    def _question(self, source: random.Random) -> list[dict[str, Any]]:
        interjected = self.odd and "system" in self.profile.roles and source.random() < 0.05
        role = "system" if interjected else "user"
        return [{"role": role, "content": self._content(source, role)}]

    def _options(self, source: random.Random, last: dict[str, Any]) -> Iterator[Callable[[], Conversation]]:
        """Yield functions that draw the next option, for messages that end in `last`."""

        def draws(name: str, value: Callable[[], Any]) -> Callable[[], Conversation]:
            return lambda: ([], {name: value()})

        is_open = last["role"] != "assistant" and source.random() < 0.8
        yield draws("add_generation_prompt", lambda: is_open)
        if self.tools and self.profile.prints_tools and source.random() < 0.5:
            yield draws("tools", lambda: [self._tool(source) for _ in range(source.randint(1, 3))])
        if "add_vision_id" in self.profile.arguments and source.random() < 0.2:
            yield draws("add_vision_id", lambda: True)
        if "enable_thinking" in self.profile.arguments and source.random() < 0.3:
            yield draws("enable_thinking", lambda: source.random() < 0.5)
        if not self.odd:
            return
        for name in self.profile.arguments:
            if source.random() < 0.1:
                yield draws(name, lambda: source.choice([True, False, self._text(source)]))
        if self.documents and source.random() < 0.2:
            yield draws("documents", lambda: [self._document(source) for _ in range(source.randint(1, 2))])
        if last["role"] == "assistant" and isinstance(last["content"], str) and source.random() < 0.4:
            yield draws("continue_final_message", lambda: True)

    def _document(self, source: random.Random) -> dict[str, Any]:
        return {"title": self._text(source), "text": self._text(source)}

    def _assistant(self, source: random.Random) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self._content(source, "assistant")}
        if source.random() < 0.4:
            message["reasoning_content"] = self._text(source)
        return message

    def _tool_round(self, source: random.Random) -> list[dict[str, Any]]:
        message = self._assistant(source)
        if source.random() < 0.3:
            message["content"] = None if self.odd and source.random() < 0.5 else ""
        calls = [self._call(source) for _ in range(source.randint(1, 3))]
        if self.profile.prints_tool_calls:
            message["tool_calls"] = calls
        results = []
        for call in calls:
            result = {"role": "tool", "content": self._content(source, "tool")}
            results.append({**result, "tool_call_id": call["id"], "name": call["function"]["name"]})
        if self.odd and source.random() < 0.3:
            source.choice(results)["name"] = self._name(source, "probe")
        return [message, *results]

    def _call(self, source: random.Random) -> dict[str, Any]:
        self._call_ids += 1
        names = source.sample(["query", "x", "box", "naïve name"], source.randint(0, 3))
        arguments = {self._name(source, name): source.choice(_ARGUMENTS) for name in names}
        if self.odd and source.random() < 0.3:
            arguments["text"] = [self._text(source)]
        function = {"name": self._name(source, source.choice(_TOOLS)), "arguments": arguments}
        return {"id": f"call{self._call_ids % 100000:05d}", "type": "function", "function": function}

    def _tool(self, source: random.Random) -> dict[str, Any]:
        types = {name: {"type": source.choice(["string", "number", "object"])} for name in ("query", "x")}
        parameters = {"type": "object", "properties": types, "required": ["query"]}
        types[self._name(source, "box")] = {"type": "array", "description": self._text(source)}
        function = {"name": self._name(source, source.choice(_TOOLS)), "description": self._text(source)}
        return {"type": "function", "function": {**function, "parameters": parameters}}

    def _content(self, source: random.Random, role: str) -> str | list[dict[str, Any]]:
        may_hold = self._pictured and bool(self.images) and role in self.profile.image_roles
        with_images = may_hold and source.random() < 0.3
        with_video = may_hold and bool(self.videos) and source.random() < 0.2
        with_audio = (
            self._pictured and bool(self.clips) and role in ("user", "tool") and source.random() < 0.4
        )
        text_only = self.profile.form.content == "text" or role == "tool"
        with_media = with_images or with_video or with_audio
        if not with_media and (source.random() < 0.6 or text_only):
            return self._text(source)
        texts = [self._text(source) for _ in range(source.randint(0 if with_images and self.odd else 1, 2))]
        parts: list[dict[str, Any]] = [{"type": "text", "text": text} for text in texts]
        for _ in range(source.choice([1, 1, 1, 1, 2, 3]) if with_images else 0):
            picture = {"type": "image", "image": source.choice(list(self.images))}
            parts.insert(source.randint(0, len(parts)), picture)
        for _ in range(source.choice([1, 1, 2]) if with_video else 0):
            video = dict(source.choice(list(self._chosen)))
            if not self._timed:
                video = {key: video[key] for key in ("type", "video", "fps")}
            parts.insert(source.randint(0, len(parts)), video)
        for _ in range(source.choice([1, 1, 2]) if with_audio else 0):
            parts.insert(source.randint(0, len(parts)), dict(source.choice(list(self.clips))))
        return parts

    def _name(self, source: random.Random, name: str) -> str:
        """Return a name, now and then with a special token in it."""
        if self.odd and self.literals and source.random() < 0.1:
            return name + source.choice(list(self.literals))
        return name

    def _text(self, source: random.Random) -> str:
        pieces = [source.choice(_PLAIN) for _ in range(source.choice([1, 1, 2, 3]))]
        if self.odd and source.random() < 0.2:
            pieces.append("".join(source.choices(_ODD_CHARACTERS, k=source.randint(1, 12))))
        if self.literals and source.random() < 0.25:
            pieces.insert(source.randint(0, len(pieces)), source.choice(list(self.literals)))
        return source.choice(["", " ", "\n"]).join(pieces)


def sample_images(source: random.Random, count: int, *, largest: int = 640) -> list[Image.Image]:
    """Two pictures of each of many sizes: noise over a gradient, so that resampling errors show."""
    pictures: list[Image.Image] = []
    while len(pictures) < count:
        size = source.randint(32, largest), source.randint(32, largest)
        for _ in range(2):
            noise = Image.frombytes("RGB", size, source.randbytes(size[0] * size[1] * 3))
            bands = [Image.linear_gradient("L").resize(size).rotate(90 * quarter) for quarter in range(3)]
            pictures.append(Image.blend(Image.merge("RGB", bands), noise, source.choice([0.1, 0.5, 1.0])))
    return pictures[:count]


def sample_videos(source: random.Random, count: int) -> list[dict[str, Any]]:
    """Parts of videos of 1 to 64 frames, odd sizes and three frame rates, with the times of their frames."""
    counts = [1, 2, 3, 64, *[source.randint(4, 40) for _ in range(count)]][:count]
    videos = []
    for number, frames in enumerate(counts):
        size = source.randint(32, 200), source.randint(32, 200)
        noise = np.frombuffer(source.randbytes(frames * size[0] * size[1] * 3), np.uint8)
        ramp = np.linspace(0, 180, frames * size[0] * size[1] * 3).astype(np.uint8)
        total = source.randint(frames, 40 * frames)
        videos.append({
            "type": "video",
            "video": (ramp + noise // 4).reshape(frames, *size, 3),
            "fps": (1.0, 12.5, 30.0)[number % 3],
            "frames_indices": sorted(source.sample(range(total), frames)),
            "total_num_frames": total,
        })  # fmt: skip
    return videos


def sample_clips(source: random.Random, count: int) -> list[dict[str, Any]]:
    """Parts of audio: WAV files of many rates and durations, of one or two channels, and silence."""
    durations = [0.05, 0.3, 1.0, 31.0, 70.0, *[source.uniform(0.05, 8.0) for _ in range(count)]][:count]
    rates = (8_000, 11_025, 16_000, 22_050, 24_000, 44_100, 48_000)
    clips = []
    for number, seconds in enumerate(durations):
        rate, channels = rates[number % len(rates)], 1 + number % 2
        frames = max(1, round(seconds * rate))
        noise = np.frombuffer(source.randbytes(2 * frames * channels), "<i2").reshape(frames, channels) // 4
        tone = 8_000 * np.sin(np.arange(frames)[:, None] * (0.02 + 0.01 * number))
        levels = np.zeros_like(noise) if number == 2 else (noise + tone).astype("<i2")
        out = io.BytesIO()
        with wave.open(out, "wb") as file:
            file.setparams((channels, 2, rate, frames, "NONE", ""))
            file.writeframes(levels.tobytes())
        data = base64.b64encode(out.getvalue()).decode()
        clips.append({"type": "audio", "audio": f"data:audio/wav;base64,{data}"})
    return clips


def load_pictures(folder: Path) -> list[Image.Image]:
    """Load every image file of a folder as RGB.

    Raises:
        InputError: The folder does not exist.
        MediaError: One of the files cannot be read.
    """
    if not folder.is_dir():
        raise InputError("no such folder", where=str(folder))
    suffixes = {".jpg", ".jpeg", ".png", ".webp", ".gif", ".tif", ".tiff", ".avif"}
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in suffixes)
    return [load_image(file, MediaPolicy(), where=file.name).image for file in files]
