"""What a tool-call grammar is: a pattern of delimiters and fields.

A pattern is a tuple. A string in it is a delimiter, with any white space before it; a `Field` is what stands
between two delimiters. `scanner.py` runs patterns; `grammars.py` holds those of the models.
"""

import re
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from mmrender.parsing.literals import Dialect


class Field(Enum):
    """What a pattern captures."""

    NAME = "the name of the tool, as text"
    ID = "the id of the call, as text"
    OBJECT = "a JSON object that holds name and arguments"
    JSON = "the arguments as a JSON object"
    VALUES = "the arguments in brackets, in a dialect"
    TAGGED = "the arguments, each in its own delimiters"
    KEY = "the name of one argument, as text"
    TEXT = "the value of one argument, as text whose type the schema decides"


Pattern: TypeAlias = tuple[str | Field, ...]


@dataclass(frozen=True)
class Section:
    """What stands round several calls.

    Attributes:
        begin: Delimiter that begins it; None where nothing does, and `head` finds it.
        end: Delimiter that ends it; None where it runs to the end of the turn.
        head: What the first call looks like where nothing begins the section. It counts at the start of the
            content and right after an added token, nowhere else.
        opens: Delimiters that may stand before the head, and belong to the section.
        brackets: Brackets of the list of calls.
        separator: What stands between calls.
    """

    begin: str | None = None
    end: str | None = None
    head: re.Pattern[str] | None = None
    opens: tuple[str, ...] = ()
    brackets: tuple[str, str] | None = None
    separator: str | None = None


@dataclass(frozen=True)
class Grammar:
    """How a model writes tool calls.

    Attributes:
        name: For people and for `grammar=`.
        call: Pattern of one call.
        section: What stands round the calls.
        argument: Pattern of one argument, for `Field.TAGGED`.
        padding: What is taken away once from each side of a `Field.TEXT`, where it stands.
        dialect: Spelling of `Field.VALUES`.
        brackets: Brackets of `Field.VALUES`, and what joins key and value.
        name_in_id: Finds the name, as its group 1, in the id.
        id_format: How ids are written, with `{name}` and `{index}`, where they are not free text.
        argument_keys: Keys of `Field.OBJECT` that may hold the arguments.
    """

    name: str
    call: Pattern
    section: Section | None = None
    argument: Pattern = ()
    padding: str = ""
    dialect: Dialect | None = None
    brackets: tuple[str, str, str] = ("{", ":", "}")
    name_in_id: re.Pattern[str] | None = None
    id_format: str | None = None
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
