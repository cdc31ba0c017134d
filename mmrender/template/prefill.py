"""A final message that the model is to continue: the text ends where that message's text ends.

As in Transformers (`render_jinja_template`), a tag is appended to the text, the template runs, and all from
the tag on is cut off. A template that trims the text trims the tag's blank, too: then trailing white space is
trimmed here. The tag is found by its origin, so no content can forge it. Some templates (LFM2) know the tag:
they take it off, and write it themselves.
"""

from typing import Any, NamedTuple

from mmrender.content.values import member
from mmrender.errors import MessageError, RenderError
from mmrender.template.text import Origin, TracedStr, plain

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning; a template is given the first two."""
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
            view: The message; its text is replaced.
            owner: Origin of what the template writes around the message.
            field: The key to continue. In a list of parts it is the last text part.

        Raises:
            MessageError: There is no such text.
        """
        value = view.get("reasoning_content" if field in REASONING and field not in view else field)
        # A template may read any name of the reasoning.
        fields = [key for key in REASONING if view.get(key) == value] if field in REASONING else [field]
        holder, where = view, member(owner.path, field)
        if isinstance(value, list):
            holder, fields = next((part for part in reversed(value) if "text" in part), {}), ["text"]
            value = holder.get("text")
        if not isinstance(value, str):
            raise MessageError(
                "the final message has no text to continue",
                where=where,
                expected="a text, or a text part",
                got="none" if value is None else type(value).__name__,
            )
        text = value if isinstance(value, TracedStr) else TracedStr(value)
        tag = Origin(owner.message, owner.role, "content", where, owner)
        for key in fields:
            holder[key] = text + TracedStr.whole(_TAG, tag)
        return cls(text, tag, where)

    def cut(self, shown: TracedStr) -> TracedStr:
        """Return what a template wrote up to the end of the text to continue.

        Raises:
            RenderError: The template does not write the text as it is, or writes more content after it, which
                would be lost.
        """
        body = plain(shown)
        tags = [start for start, _, origin in shown.spans if origin is self.tag]
        tags = tags or self._written(shown)
        stop = tags[-1] if tags else 0
        own = {origin for _, _, origin in self.text.spans}
        start = min([low for low, _, origin in shown.spans if origin in own], default=stop)
        if not body.startswith(_TAG.strip(), stop) or body[start:stop].strip() != plain(self.text).strip():
            raise RenderError(
                "the chat template does not write this text as it is, so it cannot be continued",
                where=self.where,
                expected=repr(plain(self.text).strip()[-80:]),
                got=repr(body[start:stop].strip()[-80:]) if tags else "nothing that came from it unchanged",
                remedy="Leave out what the template deletes or moves, such as reasoning in content",
            )
        for low, high, origin in shown.spans:
            if low > stop and origin.is_content and origin is not self.tag and body[low:high].strip():
                raise RenderError(
                    "the chat template writes this after the text to continue, where it would be cut off",
                    where=origin.path,
                    remedy=f"Leave it out, or do not continue {self.where}",
                )
        kept = shown[:stop]
        return kept if body.startswith(_TAG, stop) else kept.rstrip()

    def _written(self, shown: TracedStr) -> list[int]:
        """Tags that the template wrote itself, within what it wrote for the message."""
        found = [
            plain(shown).rfind(_TAG.strip(), start, stop)
            for start, stop, origin in shown.spans
            if origin.message == self.tag.message and not origin.is_content
        ]
        return [place for place in found if place >= 0]
