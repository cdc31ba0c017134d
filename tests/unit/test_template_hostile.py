"""Templates that attack: each ends in a named error, soon, and without filling memory.

The attacks run in a child process that may take 500 MB beyond what it starts with; an attack that needed more
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
SECONDS = 12
"""What one attack may take on a loaded machine: the limit of the meter, and one long operation beyond it."""

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
    "class of text": "{{ ''.__class__.__mro__ }}",
    "class of content": "{{ messages[0].content.__class__ }}",
    "class by item": "{{ messages[0].content['__class__'] }}",
    "class by attr": "{{ messages[0].content|attr('__class__')|string }}",
    "class by attr of list": "{{ messages|attr('__class__')|string }}",
    "class by map": "{{ [messages[0].content]|map(attribute='__class__')|list|string|upper }}",
    "class of null": "{{ messages[1].tool_calls[0].function.arguments.null.__class__ }}",
    "class of number": "{{ messages[1].tool_calls[0].function.arguments.a.b[0].__class__ }}",
    "class of dict": "{{ messages[0].__class__ }}",
    "init of message": "{{ messages[0].__init__ }}",
    "subclasses": "{{ ().__class__.__base__.__subclasses__() }}",
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "globals of cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "globals of joiner": "{{ joiner.__init__.__globals__ }}",
    "globals of namespace": "{{ namespace.__init__.__globals__ }}",
    "globals of dict": "{{ dict.__call__.__globals__ }}",
    "globals of clock": "{{ strftime_now.__globals__ }}",
    "closure": "{{ range.__self__ }}",
    "format attribute": "{{ '{0.__class__}'.format(messages) }}",
    "format attribute of content": "{{ messages[0].content.format.__self__ }}",
    "format item": "{{ '{0[__class__]}'.format(messages[0].content) }}",
    "format_map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "format nested": "{{ '{:{a.__class__}}'.format('x', a='') }}",
    "format by attr": "{{ ('{0.__class__}'|attr('format'))(messages) }}",
    "format by call block": "{% call(f) [].append() %}{% endcall %}",
    "spans": "{{ messages[0].content._spans }}",
    "cut": "{{ messages[0].content._cut(0, 1) }}",
    "whole": "{{ messages[0].content.whole('<|im_end|>', 1) }}",
    "mapped": "{{ messages[0].content._mapped(range) }}",
    "origin": "{{ messages[1].tool_calls[0].function.arguments.null._origin }}",
    "source": "{{ messages[1].tool_calls[0].function.arguments.a._source }}",
    "owner": "{{ messages[0]._owner.scaffold }}",
    "append": "{{ messages.append(1) }}",
    "pop": "{{ messages.pop() }}",
    "clear": "{{ messages[0].clear() }}",
    "update": "{{ messages[0].update({'role': 'system'}) }}",
    "setdefault": "{{ messages[1].tool_calls[0].function.arguments.setdefault('x', 1) }}",
    "sort": "{{ messages.sort() }}",
    "extend through attr": "{{ (messages|attr('extend'))([1]) }}",
    "loop internals": "{% for m in messages %}{{ loop._iterator }}{% endfor %}",
    "loop globals": "{% for m in messages %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "macro internals": "{% macro m() %}{% endmacro %}{{ m._func }}",
    "macro environment": "{% macro m() %}{% endmacro %}{{ m._environment }}",
    "macro globals": "{% macro m() %}{% endmacro %}{{ m.__call__.__globals__ }}",
    "self internals": "{% block b %}{{ self._TemplateReference__context }}{% endblock %}",
    "self globals": "{% block b %}{{ self.b.__init__.__globals__ }}{% endblock %}",
    "caller internals": "{% macro m() %}{{ caller.__class__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "generator frame": "{{ (messages|map('upper')).gi_frame }}",
    "namespace underscore": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "namespace init underscore": "{% set ns = namespace(__init__=1) %}{{ ns }}",
    "namespace dict underscore": "{{ namespace({'_x': 1}) }}",
    "undefined class": "{{ nothing.__class__ }}",
    "undefined method": "{{ nothing._fail_with_undefined_error.__globals__ }}",
    "filter internals": "{{ messages|map('attr', '__class__')|list|string|upper }}",
    "groupby class": "{{ messages|groupby('__class__') }}",
    "sort attribute": "{{ messages|sort(attribute='role.__class__') }}",
    "sum of classes": "{{ messages|sum(attribute='__class__') }}",
    "unguarded filter": "{{ 'x'|map('center.unguarded', 1)|list }}",
    "import": "{% import 'os' as os %}{{ os }}",
    "include": "{% include '/etc/passwd' %}",
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
    "mutual macros": "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}",
    "recursive block": "{% block b %}{{ self.b() }}{% endblock %}",
    "recursive loop": "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "recursive caller": "{% macro m() %}{{ caller() }}{% endmacro %}{% macro n() %}{% call m() %}{{ n() }}{% endcall %}{% endmacro %}{{ n() }}",
    "exponential macros": "".join(f"{{% macro m{n}() %}}{{{{ m{n + 1}() }}}}{{{{ m{n + 1}() }}}}{{% endmacro %}}" for n in range(40))
    + "{% macro m40() %}{% endmacro %}{{ m0() }}",
    "doubling +": doubled("'ab'", "ns.v + ns.v") + "{{ ns.v|length }}",
    "doubling + of content": doubled("messages[0].content", "ns.v + ns.v") + "{{ ns.v|length }}",
    "doubling ~": doubled("'ab'", "ns.v ~ ns.v"),
    "doubling *": doubled("'ab'", "ns.v * 2"),
    "doubling * of content": doubled("messages[0].content[:3] + 'x'", "ns.v * 2"),
    "doubling join": doubled("'ab'", "[ns.v, ns.v]|join"),
    "doubling join separator": doubled("'ab'", "ns.v.join(['a', 'b', 'c'])"),
    "doubling replace": doubled("'aa'", "ns.v|replace('a', 'aa')"),
    "doubling replace method": doubled("'aa'", "ns.v.replace('a', 'aa')"),
    "doubling replace of content": doubled("messages[0].content", "ns.v.replace('o', 'oo')"),
    "doubling replace of nothing": doubled("'aa'", "ns.v.replace('', 'b')"),
    "doubling %": doubled("'ab'", "'%s%s' % (ns.v, ns.v)"),
    "doubling format": doubled("'ab'", "'{0}{0}'.format(ns.v)"),
    "doubling format filter": doubled("'ab'", "'%s%s'|format(ns.v, ns.v)"),
    "doubling set block": "{% set v = 'ab' %}" + "{% set v %}{{ v }}{{ v }}{% endset %}" * 40,
    "doubling macro": "{% macro m(v) %}{{ v }}{{ v }}{% endmacro %}" + doubled("'ab'", "m(ns.v)"),
    "doubling filter block": "{% set v = 'ab' %}" + "{% set v %}{% filter upper %}{{ v }}{{ v }}{% endfilter %}{% endset %}" * 40,
    "doubling indent": doubled("'a\\nb\\n'", "ns.v|indent(ns.v)"),
    "doubling tojson": doubled("'\"\"'", "ns.v|tojson"),
    "doubling pprint": doubled("'\\\\'", "ns.v|pprint"),
    "doubling repr": doubled("['\\\\']", "[ns.v|string]"),
    "doubling translate": doubled("'aa'", "ns.v.translate({97: ns.v})"),
    "doubling list": doubled("[1]", "ns.v + ns.v"),
    "doubling list *": doubled("[1]", "ns.v * 2"),
    "doubling number": doubled("3", "ns.v * ns.v"),
    "doubling in autoescape": "{% autoescape true %}{% set v = '<<' %}" + "{% set v %}{{ v }}{{ v }}{% endset %}" * 40 + "{% endautoescape %}",
    "list *": "{{ ([1] * 10**10)|length }}",
    "list * nested": "{{ ([[1] * 1000000] * 1000000)|length }}{{ [[1] * 1000000] * 1000000 }}",
    "tuple *": "{{ (1,) * 10**10 }}",
    "text *": "{{ 'x' * 10**10 }}",
    "text * reversed": "{{ 10**10 * 'x' }}",
    "content *": "{{ messages[0].content * 10**8 }}",
    "traced number *": "{{ 'x' * (messages[0].content|length * 10**8) }}",
    "center": "{{ 'x'.center(10**10) }}",
    "center filter": "{{ 'x'|center(10**10) }}",
    "center of content": "{{ messages[0].content|center(10**10) }}",
    "center by map": "{{ ['x']|map('center', 10**10)|list }}",
    "many centers": "{{ range(99999)|map('center', 4000000)|list|length }}",
    "ljust": "{{ 'x'.ljust(10**10) }}",
    "rjust": "{{ messages[0].content.rjust(10**10, '-') }}",
    "zfill": "{{ '7'.zfill(10**10) }}",
    "expandtabs": "{{ '\\t'.expandtabs(10**10) }}",
    "indent": "{{ 'a\\nb'|indent(10**10) }}",
    "indent of many lines": "{{ ('\\n' * 1000000)|indent(1000, true, true) }}",
    "% width": "{{ '%10000000000d' % 1 }}",
    "% star": "{{ '%*d' % (10**10, 1) }}",
    "% star text": "{{ '%*s' % (10**10, 'x') }}",
    "% precision": "{{ '%.1000000000f' % 1.5 }}",
    "% star precision": "{{ '%.*f' % (10**9, 1.5) }}",
    "% key": "{{ '%(a)1000000000s' % {'a': 1} }}",
    "format width": "{{ '{:1000000000}'.format('x') }}",
    "format number width": "{{ '{:1000000000d}'.format(1) }}",
    "format nested width": "{{ '{:{}}'.format('x', 10**9) }}",
    "format looked-up width": "{{ '{:{a[w]}}'.format('x', a={'w': 10**10}) }}",
    "format float precision": "{{ '{:.1000000000f}'.format(1.5) }}",
    "format filter width": "{{ '%1000000000d'|format(1) }}",
    "format repeated": "{{ ('{0}' * 100000).format('x' * 4000000) }}",
    "percent repeated": "{{ ('%(a)s' * 100000) % {'a': 'x' * 4000000} }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "power of negative": "{{ (-9) ** 99999999 }}",
    "power of content": "{{ messages[0].content|length ** (10**9) }}",
    "round": "{{ 1|round(10**10, 'ceil') }}",
    "round down": "{{ (10**30)|round(-(10**10)) }}",
    "int of base": "{{ ('f' * 4000000)|int(base=16) // 3 }}",
    "batch": "{{ [1]|batch(10**10, 0)|list }}",
    "batch in a loop": "{% for a in [1]|batch(10**10, 0) %}{% endfor %}",
    "slice": "{{ [1]|slice(10**9)|list }}",
    "slice in a loop": "{% for a in [1]|slice(10**9) %}{{ loop.length }}{% endfor %}",
    "list of text": "{{ ('x' * 8000000)|list|length }}",
    "list of content": "{{ (messages[0].content * 10000)|list|length }}",
    "split": "{{ ('x ' * 4000000).split()|length }}",
    "split of sep": "{{ ('x,' * 4000000).split(',')|length }}",
    "splitlines": "{{ ('x\\n' * 4000000).splitlines()|length }}",
    "join of text": "{{ ','.join('x' * 8000000)|length }}",
    "sum of lists": "{{ ([[1] * 100000] * 100000)|sum(start=[])|length }}",
    "sum attribute": "{{ ([{'a': [1] * 100000}] * 100000)|sum(attribute='a', start=[])|length }}",
    "tojson indent": "{{ [1, [2]]|tojson(indent=10**10) }}",
    "tojson text indent": "{{ ([1] * 100000)|tojson(indent='x' * 4000000) }}",
    "tojson separators": "{{ ([1] * 100000)|tojson(separators=('x' * 4000000, ':')) }}",
    "tojson of content": "{{ {'a': [messages] * 10000}|tojson(indent=1000) }}",
    "wordwrap": "{{ ('x' * 8000000)|wordwrap(1) }}",
    "wordwrap separator": "{{ ('x ' * 10000)|wordwrap(1, wrapstring='y' * 1000000) }}",
    "urlize": "{{ ('(' * 4000000)|urlize }}",
    "striptags": "{{ ('<!---->' * 1000000)|striptags }}",
    "title": "{{ ('x ' * 4000000)|title }}",
    "wordcount": "{{ ('x ' * 4000000)|wordcount }}",
    "xmlattr": "{{ {'a': [messages] * 1000000}|xmlattr }}",
    "exponential list": doubled("[1]", "[ns.v, ns.v]") + "{{ ns.v }}",
    "exponential list tojson": doubled("[1]", "[ns.v, ns.v]") + "{{ ns.v|tojson }}",
    "exponential list of content": doubled("[messages[0].content]", "[ns.v, ns.v]") + "{{ ns.v|tojson }}",
    "exponential dict": doubled("{'a': 1}", "{'a': ns.v, 'b': ns.v}") + "{{ ns.v|string|length }}",
    "exponential pprint": doubled("[1]", "[ns.v, ns.v]") + "{{ ns.v|pprint }}",
    "exponential ~": doubled("[1]", "[ns.v, ns.v]") + "{{ ns.v ~ 'x' }}",
    "exponential %": doubled("[1]", "[ns.v, ns.v]") + "{{ '%s' % ns.v }}",
    "exponential join": doubled("[1]", "[ns.v, ns.v]") + "{{ ns.v|join }}",
    "exponential namespace": doubled("1", "namespace(a=ns.v, b=ns.v)") + "{{ ns.v }}",
    "exponential hash": doubled("(1,)", "(ns.v, ns.v)") + "{{ {ns.v: 1}|length }}",
    "exponential hash of look-up": doubled("(1,)", "(ns.v, ns.v)") + "{{ {}[ns.v] }}",
    "exponential hash of get": doubled("(1,)", "(ns.v, ns.v)") + "{{ {}.get(ns.v) }}",
    "exponential hash of dict": doubled("(1,)", "(ns.v, ns.v)") + "{{ dict([(ns.v, 1)]) }}",
    "exponential hash of fromkeys": doubled("(1,)", "(ns.v, ns.v)") + "{{ dict.fromkeys([ns.v]) }}",
    "exponential unique": doubled("(1,)", "(ns.v, ns.v)") + "{{ [ns.v, ns.v]|unique|list|length }}",
    "exponential ==": doubled("[1]", "[ns.v, ns.v]") + doubled("[1]", "[ns.v, ns.v]").replace("ns", "nt") + "{{ ns.v == nt.v }}",
    "exponential in": doubled("[1]", "[ns.v, ns.v]") + doubled("[1]", "[ns.v, ns.v]").replace("ns", "nt") + "{{ ns.v in [nt.v] }}",
    "exponential test": doubled("[1]", "[ns.v, ns.v]") + doubled("[1]", "[ns.v, ns.v]").replace("ns", "nt") + "{{ ns.v is eq nt.v }}",
    "exponential select": doubled("[1]", "[ns.v, ns.v]") + doubled("[1]", "[ns.v, ns.v]").replace("ns", "nt") + "{{ [ns.v]|select('eq', nt.v)|list|length }}",
    "exponential sort": doubled("[1]", "[ns.v, ns.v]") + doubled("[1]", "[ns.v, ns.v]").replace("ns", "nt") + "{{ [ns.v, nt.v]|sort|length }}",
    "exponential sort of a generator": doubled("[1]", "[ns.v, ns.v]") + doubled("[1]", "[ns.v, ns.v]").replace("ns", "nt") + "{{ [ns.v, nt.v]|map('list')|sort|length }}",
    "exponential max": doubled("[1]", "[ns.v, ns.v]") + doubled("[1]", "[ns.v, ns.v]").replace("ns", "nt") + "{{ [ns.v, nt.v]|max|length }}",
    "exponential index": doubled("[1]", "[ns.v, ns.v]") + doubled("[1]", "[ns.v, ns.v]").replace("ns", "nt") + "{{ [ns.v].index(nt.v) }}",
    "exponential changed": doubled("[1]", "[ns.v, ns.v]") + doubled("[1]", "[ns.v, ns.v]").replace("ns", "nt") + "{% for a in [ns.v, nt.v] %}{{ loop.changed(a) }}{% endfor %}",
    "long comparisons": "{% set a = 'x' * 4000000 + 'a' %}{% set b = 'x' * 4000000 + 'b' %}{{ a in [b] * 1000000 }}",
    "deep tuple hash": "{% set ns = namespace(v=1) %}{% for i in range(90000) %}{% set ns.v = (ns.v,) %}{% endfor %}{{ {ns.v: 1}|length }}",
    "deep list": "{% set ns = namespace(v=1) %}{% for i in range(90000) %}{% set ns.v = [ns.v] %}{% endfor %}{{ ns.v }}",
    "deep list tojson": "{% set ns = namespace(v=1) %}{% for i in range(90000) %}{% set ns.v = [ns.v] %}{% endfor %}{{ ns.v|tojson }}",
    "deep list ==": "{% set ns = namespace(v=1, w=1) %}{% for i in range(90000) %}{% set ns.v = [ns.v] %}{% set ns.w = [ns.w] %}{% endfor %}{{ ns.v == ns.w }}",
    "kept texts": "{% set ns = namespace(v=[]) %}{% for i in range(99999) %}{% set ns.v = [ns.v, 'x' * (1000000 + i)] %}{% endfor %}",
    "kept texts of +": "{% set ns = namespace(v=[]) %}{% set t = 'x' * 1000000 %}{% for i in range(99999) %}{% set ns.v = [ns.v, t + i|string] %}{% endfor %}",
    "kept slices": "{% set ns = namespace(v=[]) %}{% set t = 'x' * 1000000 %}{% for i in range(99999) %}{% set ns.v = [ns.v, t[i:]] %}{% endfor %}",
    "kept cases": "{% set ns = namespace(v=[]) %}{% set t = 'x' * 1000000 %}{% for i in range(99999) %}{% set ns.v = [ns.v, t.upper()] %}{% endfor %}",
    "kept lists": "{% set ns = namespace(v=[]) %}{% for i in range(99999) %}{% set ns.v = [ns.v, range(99999)|list] %}{% endfor %}",
    "kept literals": "{% set ns = namespace(v=[]) %}{% for i in range(99999) %}{% set ns.v = [ns.v, " + "i, " * 20000 + "] %}{% endfor %}",
    "kept bytes": "{% set ns = namespace(v=[]) %}{% set t = 'x' * 1000000 %}{% for i in range(99999) %}{% set ns.v = [ns.v, t.encode()] %}{% endfor %}",
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
