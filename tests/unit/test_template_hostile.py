"""Templates that attack: each ends in a named error, soon, and without filling memory.

The attacks run in a child process that may take 256 MB beyond what it starts with; an attack that needed more
would end in a MemoryError there, and one that crashed the interpreter would take all of them along.
"""

import json
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmrender.errors import TemplateError
from mmrender.messages import Message, ToolCall
from mmrender.template.chat import ChatTemplate
from mmrender.template.limits import TemplateLimits

EXTRA_MEMORY = 256 << 20
LIMITS = TemplateLimits()
SECONDS = 6
"""What one attack may take on a loaded machine; two seconds is the limit of a run."""

MESSAGES = [
    Message(role="user", content="content " * 50),
    Message(
        role="assistant",
        content="",
        tool_calls=(ToolCall(name="f", arguments={"a": {"b": [1, None, True, 2.5]}, "null": None}),),
    ),
]

# Reaching for Python.
SECURITY = {
    "encode": "{{ 'x'.encode() }}",
    "to_bytes": "{{ (1).to_bytes(8, 'big') }}",
    "translate": "{{ messages[0].content.translate({120: 'y'}) }}",
    "class of text": "{{ ''.__class__.__mro__ }}",
    "class of content": "{{ messages[0].content.__class__ }}",
    "class by attr": "{{ messages[0].content|attr('__class__')|string }}",
    "class of dict": "{{ messages[0].__class__ }}",
    "subclasses": "{{ ().__class__.__base__.__subclasses__() }}",
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "globals of cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "closure": "{{ range.__self__ }}",
    "format attribute": "{{ '{0.__class__}'.format(messages) }}",
    "format item": "{{ '{0[__class__]}'.format(messages[0].content) }}",
    "format_map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "format by call block": "{% call(f) [].append() %}{% endcall %}",
    "spans": "{{ messages[0].content.spans }}",
    "cut": "{{ messages[0].content._cut(0, 1) }}",
    "whole": "{{ messages[0].content.whole('<|im_end|>', 1) }}",
    "origin": "{{ messages[1].tool_calls[0].function.arguments.null._origin }}",
    "source": "{{ messages[1].tool_calls[0].function.arguments.a._source }}",
    "owner": "{{ messages[0]._owner.scaffold }}",
    "append": "{{ messages.append(1) }}",
    "pop": "{{ messages.pop() }}",
    "clear": "{{ messages[0].clear() }}",
    "loop globals": "{% for m in messages %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "macro internals": "{% macro m() %}{% endmacro %}{{ m._func }}",
    "self internals": "{% block b %}{{ self._TemplateReference__context }}{% endblock %}",
    "caller internals": "{% macro m() %}{{ caller.__class__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "namespace underscore": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "undefined class": "{{ nothing.__class__ }}",
    "groupby class": "{{ messages|groupby('__class__') }}",
    "extends": "{% extends '/etc/passwd' %}",
    "call of text": "{{ 'x'() }}",
}

TWICE = "{% set ns = namespace(v=%s) %}{% for i in range(60) %}{% set ns.v = %s %}{% endfor %}"


def doubled(start, step):
    return TWICE.replace("%s", start, 1).replace("%s", step, 1)


LIMIT = {
    "endless loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "endless loops in a macro": "{% macro m() %}{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}{% endmacro %}{{ m() }}",
    "endless printing": "{% for a in range(99999) %}{% for b in range(99999) %}" + "x" * 500 + "{% endfor %}{% endfor %}",
    "big range": "{% for a in range(10**9) %}{% endfor %}",
    "recursive macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "recursive loop": "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "recursive caller": "{% macro m() %}{{ caller() }}{% endmacro %}{% macro n() %}{% call m() %}{{ n() }}{% endcall %}{% endmacro %}{{ n() }}",
    "exponential macros": "".join(f"{{% macro m{n}() %}}{{{{ m{n + 1}() }}}}{{{{ m{n + 1}() }}}}{{% endmacro %}}" for n in range(40))
    + "{% macro m40() %}{% endmacro %}{{ m0() }}",
    "doubling +": doubled("'ab'", "ns.v + ns.v") + "{{ ns.v|length }}",
    "doubling ~": doubled("'ab'", "ns.v ~ ns.v"),
    "doubling *": doubled("'ab'", "ns.v * 2"),
    "doubling join": doubled("'ab'", "[ns.v, ns.v]|join"),
    "doubling replace": doubled("'aa'", "ns.v|replace('a', 'aa')"),
    "doubling replace of content": doubled("messages[0].content", "ns.v.replace('o', 'oo')"),
    "doubling %": doubled("'ab'", "'%s%s' % (ns.v, ns.v)"),
    "doubling format": doubled("'ab'", "'{0}{0}'.format(ns.v)"),
    "doubling macro": "{% macro m(v) %}{{ v }}{{ v }}{% endmacro %}" + doubled("'ab'", "m(ns.v)"),
    "doubling indent": doubled("'a\\nb\\n'", "ns.v|indent(ns.v)"),
    "doubling tojson": doubled("'\"\"'", "ns.v|tojson"),
    "doubling pprint": doubled("'\\\\'", "ns.v|pprint"),
    "doubling list": doubled("[1]", "ns.v + ns.v"),
    "doubling number": doubled("3", "ns.v * ns.v"),
    "list *": "{{ ([1] * 10**10)|length }}",
    "list * nested": "{{ ([[1] * 1000000] * 1000000)|length }}{{ [[1] * 1000000] * 1000000 }}",
    "text *": "{{ 'x' * 10**10 }}",
    "content *": "{{ messages[0].content * 10**8 }}",
    "center": "{{ 'x'.center(10**10) }}",
    "many centers": "{{ range(99999)|map('center', 4000000)|list|length }}",
    "ljust": "{{ 'x'.ljust(10**10) }}",
    "zfill": "{{ '7'.zfill(10**10) }}",
    "indent": "{{ 'a\\nb'|indent(10**10) }}",
    "indent of many lines": "{{ ('\\n' * 1000000)|indent(1000, true, true) }}",
    "% width": "{{ '%10000000000d' % 1 }}",
    "% star": "{{ '%*d' % (10**10, 1) }}",
    "format width": "{{ '{:1000000000}'.format('x') }}",
    "format repeated": "{{ ('{0}' * 100000).format('x' * 4000000) }}",
    "percent repeated": "{{ ('%(a)s' * 100000) % {'a': 'x' * 4000000} }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "round": "{{ 1|round(10**10, 'ceil') }}",
    "int of base": "{{ ('f' * 4000000)|int(base=16) // 3 }}",
    "batch": "{{ [1]|batch(10**10, 0)|list }}",
    "slice": "{{ [1]|slice(10**9)|list }}",
    "list of text": "{{ ('x' * 8000000)|list|length }}",
    "split": "{{ ('x ' * 4000000).split()|length }}",
    "splitlines": "{{ ('x\\n' * 4000000).splitlines()|length }}",
    "join of text": "{{ ','.join('x' * 8000000)|length }}",
    "sum of lists": "{{ ([[1] * 100000] * 100000)|sum(start=[])|length }}",
    "tojson indent": "{{ [1, [2]]|tojson(indent=10**10) }}",
    "tojson of content": "{{ {'a': [messages] * 10000}|tojson(indent=1000) }}",
    "wordwrap": "{{ ('x' * 8000000)|wordwrap(1) }}",
    "title": "{{ ('x ' * 4000000)|title }}",
    "wordcount": "{{ ('x ' * 4000000)|wordcount }}",
    "exponential list": doubled("[1]", "[ns.v, ns.v]") + "{{ ns.v }}",
    "exponential %": doubled("[1]", "[ns.v, ns.v]") + "{{ '%s' % ns.v }}",
    "exponential join": doubled("[1]", "[ns.v, ns.v]") + "{{ ns.v|join }}",
    "exponential hash": doubled("(1,)", "(ns.v, ns.v)") + "{{ {ns.v: 1}|length }}",
    "exponential hash of look-up": doubled("(1,)", "(ns.v, ns.v)") + "{{ {}[ns.v] }}",
    "exponential hash of dict": doubled("(1,)", "(ns.v, ns.v)") + "{{ dict([(ns.v, 1)]) }}",
    "exponential unique": doubled("(1,)", "(ns.v, ns.v)") + "{{ [ns.v, ns.v]|unique|list|length }}",
    "exponential ==": doubled("[1]", "[ns.v, ns.v]") + doubled("[1]", "[ns.v, ns.v]").replace("ns", "nt") + "{{ ns.v == nt.v }}",
    "exponential in": doubled("[1]", "[ns.v, ns.v]") + doubled("[1]", "[ns.v, ns.v]").replace("ns", "nt") + "{{ ns.v in [nt.v] }}",
    "exponential select": doubled("[1]", "[ns.v, ns.v]") + doubled("[1]", "[ns.v, ns.v]").replace("ns", "nt") + "{{ [ns.v]|select('eq', nt.v)|list|length }}",
    "exponential sort": doubled("[1]", "[ns.v, ns.v]") + doubled("[1]", "[ns.v, ns.v]").replace("ns", "nt") + "{{ [ns.v, nt.v]|sort|length }}",
    "exponential changed": doubled("[1]", "[ns.v, ns.v]") + doubled("[1]", "[ns.v, ns.v]").replace("ns", "nt") + "{% for a in [ns.v, nt.v] %}{{ loop.changed(a) }}{% endfor %}",
    "long comparisons": "{% set a = 'x' * 4000000 + 'a' %}{% set b = 'x' * 4000000 + 'b' %}{{ a in [b] * 1000000 }}",
    "deep tuple hash": "{% set ns = namespace(v=1) %}{% for i in range(90000) %}{% set ns.v = (ns.v,) %}{% endfor %}{{ {ns.v: 1}|length }}",
    "deep list": "{% set ns = namespace(v=1) %}{% for i in range(90000) %}{% set ns.v = [ns.v] %}{% endfor %}{{ ns.v }}",
    "deep list ==": "{% set ns = namespace(v=1, w=1) %}{% for i in range(90000) %}{% set ns.v = [ns.v] %}{% set ns.w = [ns.w] %}{% endfor %}{{ ns.v == ns.w }}",
    "kept texts": "{% set ns = namespace(v=[]) %}{% for i in range(99999) %}{% set ns.v = [ns.v, 'x' * (1000000 + i)] %}{% endfor %}",
    "kept slices": "{% set ns = namespace(v=[]) %}{% set t = 'x' * 1000000 %}{% for i in range(99999) %}{% set ns.v = [ns.v, t[i:]] %}{% endfor %}",
    "kept lists": "{% set ns = namespace(v=[]) %}{% for i in range(99999) %}{% set ns.v = [ns.v, range(99999)|list] %}{% endfor %}",
    "kept literals": "{% set ns = namespace(v=[]) %}{% for i in range(99999) %}{% set ns.v = [ns.v, " + "i, " * 20000 + "] %}{% endfor %}",
    "kept middles": "{% set ns = namespace(v=[]) %}{% set t = 'x' * 1000 %}{% for i in range(99999) %}{% for k in range(99999) %}{% set ns.v = [ns.v, t ~ k] %}{% endfor %}{% endfor %}",
    "many outputs in a macro": "{% macro m() %}{% for i in range(99999) %}{% for k in range(99999) %}" + "{{ i }}" * 2000 + "{% endfor %}{% endfor %}{% endmacro %}{{ m() }}",
    "many spans": "{% set t = (messages[0].content[:1] ~ '-') * 900000 %}{{ t }}{{ t }}",
    "strftime": "{{ strftime_now('%c' * 1000000) }}",
}  # fmt: skip

# Refused as they compile.
SYNTAX = {
    "deep parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep lists": "{{ " + "[" * 300 + "]" * 300 + " }}",
    "deep blocks": "{% if 1 %}" * 300 + "{% endif %}" * 300,
    "deep loops": "{% for a in [1] %}" * 60 + "{% endfor %}" * 60,
    "deep expression": "{{ " + "not " * 5000 + "1 }}",
    "long source": "x" * 3_000_000,
}

# What looks dangerous and is not: these render.
HARMLESS = {
    "folded": ("{{ [1, 2] * 3 }}", "[1, 2, 1, 2, 1, 2]"),
    "format": ("{{ '{:>5}|{!r}'.format('x', 'y') }}", "    x|'y'"),
    "own names": ("{{ messages[0].whole is defined }}", "False"),
    "power": ("{{ 2 ** 100 }}", str(2**100)),
    "negative power": ("{{ 2 ** -1 }}", "0.5"),
    "long text": ("{{ ('x' * 1000000)|length }}", "1000000"),
    "comparison": ("{{ [[1, 2], (3,)] == [[1, 2], (3,)] }}{{ (1, 2) in [(1, 2)] }}", "TrueTrue"),
    "tuple keys": ("{{ {(1, 2): 3}[(1, 2)] }}", "3"),
}


def attack(source):
    """Render; return the class and text of the error, and what it took."""
    started = time.perf_counter()
    try:
        text = ChatTemplate(source, limits=LIMITS).render(MESSAGES)
        result = ["", str(text)[:2000]]
    except TemplateError as error:
        result = [type(error).__name__, str(error)]
    except BaseException as error:
        result = [f"escaped: {type(error).__name__}", str(error)[:200]]
    return [*result, time.perf_counter() - started]


def run_all():
    """In the child: attack under a bound on memory, and print the outcomes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    bound = pages * resource.getpagesize() + EXTRA_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    for name, source in {**SECURITY, **LIMIT, **SYNTAX}.items():
        print(json.dumps([name, *attack(source)]), flush=True)


@pytest.fixture(scope="module")
def outcomes():
    """What became of every attack: `{name: (class, text, seconds)}`."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc to bound the memory of a process")
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, timeout=280, check=False
    )
    found = {name: rest for name, *rest in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == 0, (
        f"the child died of {[*SECURITY, *LIMIT, *SYNTAX][len(found)]!r}: {done.stderr[-400:]}"
    )
    return found


@pytest.mark.parametrize("name", SECURITY)
def test_reaching_for_python_gives_nothing(outcomes, name):
    kind, text, seconds = outcomes[name]
    assert seconds < SECONDS
    if kind:
        assert kind in ("TemplateSecurityError", "TemplateRuntimeError", "TemplateSyntaxError"), text
    else:
        # As in Jinja, what may not be seen prints as nothing, and only its use raises.
        assert not re.search(r"<[a-z]|__|0x|object|Origin", text), text


@pytest.mark.parametrize("name", LIMIT)
def test_spending_too_much_is_refused(outcomes, name):
    kind, text, seconds = outcomes[name]
    assert kind == "TemplateLimitError", text
    assert "MemoryError" not in text
    assert "the chat template used too much" in text
    assert seconds < SECONDS


@pytest.mark.parametrize("name", SYNTAX)
def test_sources_too_deep_or_long_are_refused(outcomes, name):
    kind, text, seconds = outcomes[name]
    assert kind in ("TemplateSyntaxError", "TemplateLimitError"), text
    assert seconds < SECONDS


@pytest.mark.parametrize("name", HARMLESS)
def test_what_looks_dangerous_and_is_not_renders(name):
    source, expected = HARMLESS[name]
    assert ChatTemplate(source, limits=LIMITS).render(MESSAGES) == expected


if __name__ == "__main__":
    run_all()
