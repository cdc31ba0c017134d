"""`DeliveryId`: a sender and a sequence number, which identify a message over all receivers and files."""

import re
from typing import Final, NamedTuple

MAX_NUMBER: Final = 1 << 62
"""Bound on sequence numbers, which are below it."""
_FORM: Final = re.compile(r"([0-9a-f]{32}):([1-9][0-9]{0,18})")


class DeliveryId(NamedTuple):
    """The identity of a shipped message. `str` of it is the id of the message's record in a file.

    Attributes:
        sender: The sender's id, 32 hexadecimal digits.
        number: The message's sequence number, from 1 on, which rises with each message of the sender.
    """

    sender: str
    number: int

    def __str__(self) -> str:
        return f"{self.sender}:{self.number}"

    @classmethod
    def parse(cls, text: str) -> "DeliveryId | None":
        """Return the identity that a text names, or None if it has another form."""
        match = _FORM.fullmatch(text)
        return None if match is None or int(match[2]) >= MAX_NUMBER else cls(match[1], int(match[2]))
