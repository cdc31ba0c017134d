"""Every operation of `TracedStr` gives what `str` gives; each character keeps its origin, or all is content.

The reference is slow and plain: a list of `(character, origin)` pairs. Origins are told apart by the character
itself: every character of a random text has an origin of its own choice, so a result is right when its
characters carry, in order, the origins of the characters that they are.
"""

import copy
import operator
import pickle
import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrender.template.environment import TracingEnvironment
from mmrender.template.filters import to_json
from mmrender.template.text import SEVERAL, Origin, TracedStr, concat, percent, plain, tainted, text_of

A, B, C = (Origin(index, "user", "content", f"messages[{index}].content") for index in range(3))
NO = None

# Characters with images of other lengths, line ends, sigma, tabs, combining marks, a surrogate pair's partner.
LETTERS = "aAbB zZ\t\n\r\x0b\x85\u2028ßİıΣσςŉǰΐﬁǆǅ'\"\\{}%<&>-([+0٣\u0301é日𝒳"
texts = st.text(st.sampled_from(LETTERS) | st.characters(codec="utf-8"), max_size=12)
short = st.text(st.sampled_from("ab \tßΣ\n"), max_size=3)


def spans_of(text):
    return getattr(text, "spans", ())


@st.composite
def traced(draw, values=texts):
    text = draw(values)
    origins = draw(st.lists(st.sampled_from([A, B, C, NO]), min_size=len(text), max_size=len(text)))
    return concat(TracedStr.whole(c, o) if o else c for c, o in zip(text, origins, strict=True))


def pairs(text):
    """The reference form: `(character, origin)` for each character."""
    result = [[char, None] for char in plain(text)]
    for start, stop, origin in spans_of(text):
        assert 0 <= start < stop <= len(result)
        for index in range(start, stop):
            assert result[index][1] is None, "spans overlap"
            result[index][1] = origin
    return [tuple(pair) for pair in result]


def check_spans(text):
    """Spans rise, do not overlap, and are as few as can be."""
    spans = spans_of(text)
    for (_, stop, origin), (start, _, later) in pairwise(spans):
        assert stop < start or (stop == start and origin is not later)


def same(result, expected):
    """Equal as `str`, down to the types that `str` gives."""
    if isinstance(expected, str):
        assert isinstance(result, str)
        assert plain(result) == expected
        check_spans(result)
    elif isinstance(expected, list | tuple):
        assert type(result) is type(expected)
        assert len(result) == len(expected)
        for one, other in zip(result, expected, strict=True):
            same(one, other)
    else:
        assert type(result) is type(expected)
        assert result == expected


def outcome(call):
    try:
        return call(), None
    except Exception as error:
        return None, type(error)


small = st.integers(-4, 20)
index = st.none() | st.integers(-14, 14)
chars = st.none() | short
tables = st.dictionaries(
    st.sampled_from([ord(char) for char in LETTERS]),
    st.none() | st.sampled_from([97, 0x1F600]) | short,
    max_size=4,
)
WITHOUT_ARGUMENTS = (
    "capitalize", "casefold", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower",
    "isnumeric", "isprintable", "isspace", "istitle", "isupper", "lower", "swapcase", "title", "upper",
    "__hash__", "__len__", "__repr__", "__str__",
)  # fmt: skip
FILL = st.tuples(small) | st.tuples(small, st.sampled_from(["*", "", "ab", "日"]))
FIND = st.tuples(short) | st.tuples(short, index) | st.tuples(short, index, index)
STRIP = st.tuples() | st.tuples(chars) | st.tuples(st.just(3))
SPLIT = st.tuples() | st.tuples(chars) | st.tuples(chars, small) | st.tuples(st.just(3))
PARTITION = st.tuples(short) | st.tuples(st.just(3))
COMPARE = st.tuples(texts) | st.tuples(small)
FORMATS = ["", "10", ">10", "<10", "^9", "*^9", "010", ".3", "x>8.2s", "=9", "d", "z"]
ITEMS = st.integers(-14, 14) | st.builds(slice, index, index, index) | short
ARGUMENTS = {
    **dict.fromkeys(WITHOUT_ARGUMENTS, st.tuples()),
    **dict.fromkeys(("center", "ljust", "rjust"), FILL),
    **dict.fromkeys(("count", "find", "index", "rfind", "rindex", "startswith"), FIND),
    **dict.fromkeys(("lstrip", "rstrip", "strip"), STRIP),
    **dict.fromkeys(("rsplit", "split"), SPLIT),
    **dict.fromkeys(("partition", "rpartition"), PARTITION),
    **dict.fromkeys(("removeprefix", "removesuffix", "__contains__"), st.tuples(short)),
    **dict.fromkeys(("__add__", "__eq__", "__ge__", "__gt__", "__le__", "__lt__", "__ne__"), COMPARE),
    "encode": st.tuples() | st.tuples(st.sampled_from(["utf-8", "ascii", "latin-1", "none"])),
    "endswith": st.tuples(short) | st.tuples(st.tuples(short, short)),
    "expandtabs": st.tuples() | st.tuples(small),
    "format": st.tuples(texts, small),
    "format_map": st.tuples(st.dictionaries(st.sampled_from("ab"), texts)),
    "join": st.tuples(st.lists(short | st.just(3), max_size=4) | texts),
    "maketrans": st.tuples(st.dictionaries(st.sampled_from("ab"), short)),
    "replace": st.tuples(short, short) | st.tuples(short, short, small) | st.tuples(short, st.just(3)),
    "splitlines": st.tuples() | st.tuples(st.booleans()),
    "translate": st.tuples(tables),
    "zfill": st.tuples(small),
    "__format__": st.tuples(st.sampled_from(FORMATS)),
    "__getitem__": st.tuples(ITEMS),
    "__mod__": st.tuples(texts | st.tuples(texts, small) | st.dictionaries(short, texts)),
    "__mul__": st.tuples(small) | st.tuples(short),
    "__rmul__": st.tuples(small),
}
NOT_OPERATIONS = {
    "__class__", "__delattr__", "__dir__", "__doc__", "__getattribute__", "__getnewargs__", "__getstate__", "__init__",
    "__init_subclass__", "__iter__", "__new__", "__reduce__", "__reduce_ex__", "__rmod__", "__setattr__", "__sizeof__",
    "__subclasshook__",
}  # fmt: skip


def test_every_method_is_listed():
    known = set(ARGUMENTS) | NOT_OPERATIONS
    assert not {name for name in dir(str) if name not in known}
    assert set(ARGUMENTS) <= set(dir(str))


OPERATORS = {f"__{name}__": getattr(operator, name) for name in ("add", "contains", "getitem", "mod", "mul")}
OPERATORS |= {f"__{name}__": getattr(operator, name) for name in ("eq", "ge", "gt", "le", "lt", "ne")}
OPERATORS |= {"__format__": format, "__rmul__": lambda text, count: count * text}


def apply(name, text, args):
    if name in OPERATORS:
        return OPERATORS[name](text, *args)
    return getattr(text, name)(*args)


def assert_as_str(name, text, args=()):
    expected, error = outcome(lambda: apply(name, plain(text), args))
    result, raised = outcome(lambda: apply(name, text, args))
    assert raised is error, name
    same(result, expected)


@given(traced())
def test_methods_without_arguments_give_what_str_gives(text):
    for name in WITHOUT_ARGUMENTS:
        assert_as_str(name, text)


@pytest.mark.parametrize("name", sorted(set(ARGUMENTS) - set(WITHOUT_ARGUMENTS)))
def test_methods_give_what_str_gives(name):
    law = given(traced(), ARGUMENTS[name])(lambda text, args: assert_as_str(name, text, args))
    settings(max_examples=12)(law)()


@given(traced(), traced(short), traced(short))
def test_traced_arguments_give_what_plain_arguments_give(text, one, other):
    for call in (
        lambda s, a, b: s + a,
        lambda s, a, b: a + s,
        lambda s, a, b: s.replace(a, b),
        lambda s, a, b: s.replace(a, b, 2),
        lambda s, a, b: s.join([a, b, a]),
        lambda s, a, b: s.join(a),
        lambda s, a, b: s.split(a or None),
        lambda s, a, b: s.strip(a),
        lambda s, a, b: s.removeprefix(a).removesuffix(b),
        lambda s, a, b: s.partition(a or "b"),
        lambda s, a, b: s.ljust(9, a[:1] or "-"),
        lambda s, a, b: s.center(9, a[:1] or "-"),
        lambda s, a, b: s.translate({97: a, 98: b}),
        lambda s, a, b: "%s and %r" % (a, s),  # noqa: UP031
        lambda s, a, b: "{} {!r:>9} {x!a}".format(s, a, x=b),
        lambda s, a, b: f"{s}{a!r}{b:^7}",
        lambda s, a, b: s in a or a < b,
        lambda s, a, b: s == a,
    ):
        same(call(text, one, other), call(plain(text), plain(one), plain(other)))


@given(traced(), st.integers(-14, 14), index, index)
def test_slices_keep_the_origin_of_each_character(text, at, start, stop):
    assert pairs(text[start:stop]) == pairs(text)[start:stop]
    if -len(text) <= at < len(text):
        assert pairs(text[at]) == [pairs(text)[at]]
    assert [pairs(char) for char in text] == [[pair] for pair in pairs(text)]
    assert [pairs(char) for char in reversed(text)] == [[pair] for pair in reversed(pairs(text))]


@given(traced(), chars, st.booleans())
def test_pieces_are_slices(text, sep, keepends):
    """Whatever is split, trimmed or partitioned is made of slices, found here by walking through the text."""
    results = [
        text.split(), text.rsplit(None, 1), text.splitlines(keepends), [text.strip(sep)], [text.lstrip(sep)],
        [text.rstrip(sep)], [text.removeprefix("a")], [text.removesuffix("a")],
    ]  # fmt: skip
    if sep:
        results += [text.split(sep), text.rsplit(sep, 2), text.partition(sep), text.rpartition(sep)]
    reference = pairs(text)
    for pieces in results:
        if sep is None or len(pieces) > 1:
            position = 0
            for piece in pieces:
                shown = pairs(piece)
                starts = [
                    i for i in range(position, len(reference) + 1) if reference[i : i + len(shown)] == shown
                ]
                assert starts, f"{piece!r} is no slice"
                position = starts[0] + len(shown)


@given(traced(), short.filter(bool))
def test_splits_are_the_slices_between_separators(text, sep):
    reference = pairs(text)
    expected, position = [], 0
    for piece in plain(text).split(sep):
        expected.append(reference[position : position + len(piece)])
        position += len(piece) + len(sep)
    assert [pairs(piece) for piece in text.split(sep)] == expected
    for parts in (text.partition(sep), text.rpartition(sep)):
        assert sum(map(pairs, parts), []) == reference


@given(st.lists(traced(short), max_size=5), traced(short))
def test_joins_keep_the_origin_of_each_character(pieces, separator):
    expected = []
    for number, piece in enumerate(pieces):
        expected += (pairs(separator) if number else []) + pairs(piece)
    assert pairs(separator.join(pieces)) == expected
    assert pairs(concat(pieces)) == [pair for piece in pieces for pair in pairs(piece)]


@given(traced(), traced(short), traced(short), small)
def test_what_a_replacement_brings_keeps_its_origin(text, old, new, count):
    expected, position, left = [], 0, count
    reference = pairs(text)
    while position <= len(text):
        if left != 0 and plain(text).startswith(plain(old), position) and (old or position <= len(text)):
            expected += pairs(new)
            left -= 1
            if old:
                position += len(old)
                continue
        expected += reference[position : position + 1]
        position += 1
    assert pairs(text.replace(old, new, count)) == expected


@given(traced(), st.integers(0, 4))
def test_products_repeat_origins(text, count):
    assert pairs(text * count) == pairs(count * text) == pairs(text) * count


CASES = ("lower", "upper", "casefold", "swapcase", "title", "capitalize")


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=25)
@given(text=traced())
def test_case_mappings_keep_origins_where_no_character_grows(name, text):
    result = getattr(text, name)()
    if len(result) == len(text):
        assert [origin for _, origin in pairs(result)] == [origin for _, origin in pairs(text)]
    else:
        check_tainted(result, text)


def check_tainted(result, *sources):
    """All content in, all content out: of the one message, or of none."""
    origins = {origin for source in sources for _, origin in pairs(source)} - {None}
    expected = None if not origins else origins.pop() if len(origins) == 1 else SEVERAL
    assert {origin for _, origin in pairs(result)} <= {expected}, result


FORMAT = lambda template: TracingEnvironment().wrap_str_format(template.format)  # noqa: E731


@given(traced(), traced(short), small)
def test_operations_that_lose_characters_taint(text, other, width):
    fill = other[:1] or "-"
    for result, *sources in (
        (text[::-1], text),
        (text[::2], text),
        (text.ljust(width, fill), text, fill),
        (text.rjust(width, fill), text, fill),
        (text.center(width, fill), text, fill),
        (text.zfill(width), text),
        (percent("%s|%s", (text, other)), text, other),
        (percent("%(a)s%%", {"a": text}), text),
        (percent(text.replace("%", "") + "%d", 3), text.replace("%", "")),
        (text_of([text, {"k": other}]), text, other),
        (FORMAT("{}{b!r}")(text, b=other), text, other),
        (to_json(text), text),
        (to_json({"k": [text, other]}, indent=1), text, other),
    ):
        check_tainted(result, *sources)


def test_tainted_text_belongs_to_its_value_to_the_caller_or_to_no_message():
    user, call = Origin(0, "user", "content", "u"), Origin(0, "assistant", "tool_call", "c")
    scaffold = Origin(0, "user", "scaffold", "messages[0]")
    for sources, expected in (
        ([A, A], A),
        ([A, B], SEVERAL),
        ([user, call], call),
        ([scaffold, user], user),
        ([scaffold], scaffold),
        ([scaffold, Origin(1, "user", "role", "r")], None),
        ([], None),
    ):
        result = tainted("xy", *[TracedStr.whole("s", origin) for origin in sources], "plain", 3)
        assert [origin for _, origin in pairs(result)] == [expected, expected]
    assert spans_of(tainted("", TracedStr.whole("s", A))) == ()


TEMPLATES = st.text(st.sampled_from("%sdrcxia.5*()-+ #0ab{}:!>^"), max_size=8)


@given(TEMPLATES, traced(short), st.integers(-9, 300))
def test_percent_formats_fail_and_succeed_as_those_of_str(template, text, number):
    for values, plain_values in (
        ((text,), (plain(text),)),
        ((number, text), (number, plain(text))),
        (text, plain(text)),
        (number, number),
        ({"a": text, "": number}, {"a": plain(text), "": number}),
        ((), ()),
        ([text], [plain(text)]),
    ):
        expected, error = outcome(lambda: template % plain_values)  # noqa: B023
        result, raised = outcome(lambda: TracedStr(template) % values)  # noqa: B023
        # Where several things are wrong with a template, either may be found first.
        assert (raised is None) == (error is None), (template, values)
        if expected is not None:
            assert plain(result) == expected


@given(TEMPLATES, traced(short), st.integers(-9, 300))
def test_brace_formats_fail_and_succeed_as_those_of_str(template, text, number):
    for template_ in (template, template + "{}", "{:" + template + "}", "{!" + template + "}", "{a:{b}}"):
        expected, error = outcome(lambda: template_.format(plain(text), number, a=number, b=3))  # noqa: B023
        result, raised = outcome(lambda: TracedStr(template_).format(text, number, a=number, b=3))  # noqa: B023
        assert raised is error, template_
        if expected is not None:
            assert plain(result) == expected


@given(traced())
def test_copies_and_pickles_are_plain(text):
    for clone in (pickle.loads(pickle.dumps(text)), copy.deepcopy(text)):
        assert type(clone) is str
        assert clone == text
    assert sys.intern(plain(text)) == text
    assert hash(text) == hash(plain(text))
    assert {plain(text): 1}[text] == 1
    assert type(plain(text)) is str
    assert str(text) is text
