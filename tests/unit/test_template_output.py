"""Printed sums and look-ups, wherever they stand, against plain Jinja: text, refusals and origins."""

import pytest

from traced_cases import ORIGINS, render_both

ENTRIES = {"text": "entry", "items": "an entry named like a method", "number": 7}
PRINTED = (
    "{{ '<' + a + '|' + b + '>' }}",
    "{{ a + b }}{{ b + a }}tail",
    "{{ 1 + 2 + 3 }}",
    "{{ a + 1 }}",
    "{{ a + missing }}",
    "{{ [1] + [2] }}",
    "{{ a + b if a else b + a }}",
    "{{ 'x' + 'y' }}{{ a + 'y', 'z' }}",
    "{{ entry.text + entry['text'] }}",
    "{{ entry['items'] }}",
    "{{ entry.items() | list }}",
    "{{ entry.get('text') + entry.get('none', 'default') }}",
    "{{ entry.nothing }}|{{ entry['nothing'] }}|{{ entry[7] }}|{{ entry.__class__ }}",
    "{{ entry.nothing + a }}",
    "{{ entry.number + 1 }}",
)
PLACES = (
    "%s",
    "{%% macro m() %%}(%s){%% endmacro %%}{{ m() }}{{ m() }}",
    "{%% set kept %%}[%s]{%% endset %%}{{ kept }}",
    "{%% for one in [1, 2] %%}%s{%% endfor %%}",
    "{%% generation %%}%s{%% endgeneration %%}",
    "{%% if true %%}%s{%% endif %%}",
    "{%% filter upper %%}%s{%% endfilter %%}",
)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("printed", PRINTED)
def test_what_is_printed_is_that_of_plain_jinja(printed, place):
    """`render_both` compares text and error; here, that every letter keeps its origin."""
    variables = {"a": "alpha", "b": "beta", "entry": ENTRIES}
    text = render_both(place % printed, variables)
    for word, origin in (("alpha", ORIGINS["a"]), ("beta", ORIGINS["b"])):
        start = -1 if text is None else text.lower().find(word)
        if start >= 0 and "filter" not in place and "," not in printed:
            assert [span[2] for span in text[start : start + len(word)].spans] == [origin]
