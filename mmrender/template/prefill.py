"""Continue the final message: the rendered text ends with the text of this message.

As in Transformers (`render_jinja_template`), a tag is appended to the text, the template runs, and everything
from the tag on is cut off. If a template trims the text, it trims the tag's blank, too. Trailing white space
is then trimmed here. The tag is found by its origin, so content cannot forge it. Some templates (LFM2) know
the tag: they remove it, and write it themselves.
"""

from typing import Any, NamedTuple

from mmrender.content.messages import REASONING_KEYS
from mmrender.content.values import member
from mmrender.errors import MessageError, RenderError
from mmrender.template.text import Origin, TracedStr, plain

_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class Prefill(NamedTuple):
    """The tagged text of a final message.

    Attributes:
        text: The text without the tag.
        tag: Origin of the tag.
        where: Path of the text.
    """

    text: TracedStr
    tag: Origin
    where: str

    @classmethod
    def of(cls, view: dict[str, Any], owner: Origin, field: str) -> "Prefill":
        """Tag the text of a message as the template sees it.

        Args:
            view: The message, whose text is replaced.
            owner: Origin of the template text around the message.
            field: The key to continue. In a list of parts it is the last text part.

        Raises:
            MessageError: The message lacks this text.
        """
        value = view.get("reasoning_content" if field in REASONING_KEYS and field not in view else field)
        fields = [field]
        if field in REASONING_KEYS:  # a template may read any name of the reasoning
            fields = [key for key in REASONING_KEYS if view.get(key) == value]
        holder, where = view, member(owner.path, field)
        if isinstance(value, list):
            holder, fields = next((part for part in reversed(value) if "text" in part), {}), ["text"]
            value = holder.get("text")
        if not isinstance(value, str):
            raise MessageError(
                "the final message lacks the text to continue",
                where=where,
                expected="a text, or a text part",
                got="none" if value is None else type(value).__name__,
            )
        text = value if isinstance(value, TracedStr) else TracedStr(value)
        tag = Origin(owner.message, owner.role, "content", where, owner)
        for key in fields:
            holder[key] = text + TracedStr.whole(_TAG, tag)
        return cls(text, tag, where)

    def cut(self, rendered: TracedStr) -> TracedStr:
        """Return a rendered text up to the end of the text to continue.

        Raises:
            RenderError: The template changes the text to continue, or writes more content after it, which
                would be lost.
        """
        body = plain(rendered)
        tags = [start for start, _, origin in rendered.spans if origin is self.tag]
        tags = tags or [
            position
            for start, stop, origin in rendered.spans
            if origin.message == self.tag.message and not origin.is_content
            if (position := body.rfind(_TAG.strip(), start, stop)) >= 0
        ]
        stop = tags[-1] if tags else 0
        origins = {origin for _, _, origin in self.text.spans}
        start = min([low for low, _, origin in rendered.spans if origin in origins], default=stop)
        if not body.startswith(_TAG.strip(), stop) or body[start:stop].strip() != plain(self.text).strip():
            raise RenderError(
                "the chat template changes this text, so it cannot be continued",
                where=self.where,
                expected=repr(plain(self.text).strip()[-80:]),
                got=repr(body[start:stop].strip()[-80:]) if tags else "no unchanged part of it",
                remedy="Leave out text that the template deletes or moves, such as reasoning in content",
            )
        for low, high, origin in rendered.spans:
            if low > stop and origin.is_content and origin is not self.tag and body[low:high].strip():
                raise RenderError(
                    "the chat template writes this after the text to continue, so it would be cut off",
                    where=origin.path,
                    remedy=f"Leave it out, or do not continue {self.where}",
                )
        kept = rendered[:stop]
        return kept if body.startswith(_TAG, stop) else kept.rstrip()
