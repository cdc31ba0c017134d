"""Templates that attack: each ends in a named error, soon, and without filling memory.

They run as templates that are not trusted do: in child processes with limits. The bounds of a run stop most of them;
those of the operating system stop the rest, and would end a child that did anything else.
"""

import os
import re
import resource

import numpy as np
import pytest

from kit import error_of, shown, user
from mmrender import Renderer, RendererPool
from mmrender.errors import InputError, PoolClosedError, TemplateError, TemplateLimitError
from mmrender.messages import Message, RenderRequest, ToolCall
from mmrender.processes import BoundedProcesses
from mmrender.template.chat import ChatTemplate
from mmrender.template.processes import IsolatedTemplate

SECONDS, MEMORY = 0.25, 256 << 20
"""What one attack may take of a process."""

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

MANY = "{% for a in range(99999) %}{{ %s }}{% endfor %}"
NESTED = (
    "{% set ns = namespace(v=(1,), w=(1,)) %}{% for i in range(60) %}"
    "{% set ns.v = (ns.v, ns.v) %}{% set ns.w = (ns.w, ns.w) %}{% endfor %}"
)
TWICE = "{% set ns = namespace(v=%s) %}{% for i in range(60) %}{% set ns.v = %s %}{% endfor %}"


def doubled(start, step):
    return TWICE.replace("%s", start, 1).replace("%s", step, 1)


# Stopped by the bounds of a run.
LIMIT = {
    "endless printing": "{% for a in range(99999) %}{% for b in range(99999) %}" + "x" * 500 + "{% endfor %}{% endfor %}",
    "big range": "{% for a in range(10**9) %}{% endfor %}",
    "recursive macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "recursive loop": "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "recursive caller": "{% macro m() %}{{ caller() }}{% endmacro %}{% macro n() %}{% call m() %}{{ n() }}{% endcall %}{% endmacro %}{{ n() }}",
    "doubling +": doubled("'ab'", "ns.v + ns.v") + "{{ ns.v|length }}",
    "doubling ~": doubled("'ab'", "ns.v ~ ns.v"),
    "doubling *": doubled("'ab'", "ns.v * 2"),
    "doubling join": doubled("'ab'", "[ns.v, ns.v]|join"),
    "doubling %": doubled("'ab'", "'%s%s' % (ns.v, ns.v)"),
    "doubling format": doubled("'ab'", "'{0}{0}'.format(ns.v)"),
    "doubling macro": "{% macro m(v) %}{{ v }}{{ v }}{% endmacro %}" + doubled("'ab'", "m(ns.v)"),
    "doubling tojson": doubled("'\"\"'", "ns.v|tojson"),
    "list *": "{{ ([1] * 10**10)|length }}",
    "text *": "{{ 'x' * 10**10 }}",
    "content *": "{{ messages[0].content * 10**8 }}",
    "ljust": "{{ 'x'.ljust(10**10) }}",
    "rjust": "{{ 'x'.rjust(10**10) }}",
    "zfill": "{{ '1'.zfill(10**10) }}",
    "center": "{{ 'x'|center(10**10) }}",
    "join over many": "{{ range(9999)|map('string')|join('x' * 90000) }}",
    "replace by long": "{{ ('a' * 100000)|replace('a', 'b' * 100000) }}",
    "doubling split": doubled("'a'", "(ns.v ~ ns.v).split('b')|first"),
}  # fmt: skip

# Stopped by time: the process's, which is shorter here than that of a run.
TIME = {
    "endless loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "endless loops in a macro": "{% macro m() %}{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}{% endmacro %}{{ m() }}",
    "many groups": MANY.replace("%s", "range(99999)|groupby('real')|list|length"),
    "many sorts": MANY.replace("%s", "range(99999)|sort|length"),
    "many unique": MANY.replace("%s", "range(99999)|unique|list|length"),
    "many sums": MANY.replace("%s", "range(99999)|sum"),
    "many memberships": MANY.replace("%s", "-1 in range(99999)|list"),
    "many wraps": MANY.replace("%s", "('x ' * 100000)|wordwrap(1)|length"),
    "squares": doubled("3", "ns.v * ns.v"),
}  # fmt: skip

# Stopped by the operating system, or by Python.
OUTSIDE = {
    "doubling replace of content": doubled("messages[0].content", "ns.v.replace('o', 'oo')"),
    "doubling list": doubled("[1]", "ns.v + ns.v"),
    "power": "{{ 9 ** (9 ** 9) }}",
    "% width": "{{ '%10000000000d' % 1 }}",
    "sum of lists": "{{ ([[1] * 100000] * 100000)|sum(start=[])|length }}",
    "exponential list": doubled("[1]", "[ns.v, ns.v]") + "{{ ns.v }}",
    "deep list": "{% set ns = namespace(v=1) %}{% for i in range(90000) %}{% set ns.v = [ns.v] %}{% endfor %}{{ ns.v }}",
    "kept slices": "{% set ns = namespace(v=[]) %}{% set t = 'x' * 1000000 %}{% for i in range(99999) %}{% set ns.v = [ns.v, t[i:]] %}{% endfor %}",
    "kept lists": "{% set ns = namespace(v=[]) %}{% for i in range(99999) %}{% set ns.v = [ns.v, range(99999)|list] %}{% endfor %}",
    "tuples in a dict": NESTED + "{{ ns.v in {} }}",
    "tuples compared": NESTED + "{{ ns.v == ns.w }}",
    "tuples grouped": NESTED + "{{ [{'a': ns.v}, {'a': ns.w}]|groupby('a')|list|length }}",
    "tuples written": NESTED + "{{ '{}'.format(ns.v) }}",
    "bytes": "{{ 'a'.encode().ljust(3000000000) }}",
    "bytes of numbers": "{{ (1).to_bytes(3000000000, 'big') }}",
    "% precision": "{{ '%.10000000000f' % 1 }}",
    "tabs": "{{ '\t'.expandtabs(10**10) }}",
    "format width": "{{ '{:10000000000}'.format(1) }}",
    "format width within": "{{ '{:{w}}'.format(1, w=10**10) }}",
    "format filter": "{{ '%10000000000d'|format(1) }}",
    "indent": "{{ ('x\n' * 100000)|indent(100000) }}",
    "batch filled up": "{{ range(10)|batch(10**9, 'x')|list }}",
    "many centers": "{{ range(99999)|map('center', 4000000)|list|length }}",
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


@pytest.fixture(scope="module")
def processes():
    with BoundedProcesses(memory_bytes=MEMORY, cpu_seconds=SECONDS) as processes:
        yield processes


def asked(processes, function, *arguments):
    """The result of a built-in function in the process, which imports nothing for it."""
    return processes.ask("ran", TemplateLimitError, function, *arguments)


def spent(used):
    """Processor time and the most memory of a process, or of all that this one waited for."""
    return used.ru_utime + used.ru_stime, used.ru_maxrss << 10


def spent_by_process(processes):
    return spent(asked(processes, resource.getrusage, resource.RUSAGE_SELF))


def spent_by_ended():
    return spent(resource.getrusage(resource.RUSAGE_CHILDREN))


def attack(processes, source):
    """The text that a template writes, or its error, within the bounds of time and memory."""
    started, base = spent_by_process(processes)
    child = processes._executor._processes[asked(processes, os.getpid)]
    ended, _ = spent_by_ended()
    try:
        template = IsolatedTemplate(source, processes=processes)
        # Reading a template and rendering it are two calls, each of which has the bound.
        read, _ = spent_by_process(processes)
        assert read - started < SECONDS + 0.2
        started = read
        found = template.render(RenderRequest(MESSAGES))
    except TemplateError as error:
        found = error
    if isinstance(found, TemplateError) and "was ended" in str(found):
        child.join()
        now, peak = spent_by_ended()
        seconds = now - ended
    else:
        seconds, peak = spent_by_process(processes)
    assert seconds - started < SECONDS + 0.2
    assert peak - base < MEMORY + (32 << 20)
    return found


@pytest.mark.parametrize("name", SECURITY)
def test_reaching_for_python_gives_nothing(processes, name):
    found = attack(processes, SECURITY[name])
    if isinstance(found, TemplateError):
        kinds = ("TemplateSecurityError", "TemplateRuntimeError", "TemplateSyntaxError")
        assert type(found).__name__ in kinds, found
    else:
        # As in Jinja, what may not be seen prints as nothing, and only its use raises.
        assert not re.search(r"<[a-z]|__|0x|object|Origin", found), found


TOO_MUCH = [
    *[(source, {"TemplateLimitError"}) for source in (LIMIT | TIME).values()],
    *[(source, {"TemplateSyntaxError", "TemplateLimitError"}) for source in SYNTAX.values()],
    *[(source, None) for source in OUTSIDE.values()],
]


assert len(TOO_MUCH) >= 60


@pytest.mark.parametrize(("source", "kinds"), TOO_MUCH, ids=[*LIMIT, *TIME, *SYNTAX, *OUTSIDE])
def test_spending_too_much_is_refused(processes, source, kinds):
    found = attack(processes, source)
    assert isinstance(found, TemplateError), found
    assert kinds is None or type(found).__name__ in kinds, found
    if source in LIMIT.values():
        assert "the chat template used too much" in str(found)


@pytest.mark.parametrize("name", HARMLESS)
def test_what_looks_dangerous_and_is_not_renders(processes, name):
    source, expected = HARMLESS[name]
    assert ChatTemplate(source).render(RenderRequest(MESSAGES)) == expected
    assert attack(processes, source) == expected


def test_a_renderer_whose_template_runs_in_processes_gives_the_same(processes, tiny_model, renderer):
    there = Renderer.from_pretrained(tiny_model, image_backend="pil", template_processes=processes)
    assert there.profile == renderer.profile
    picture = shown(np.zeros((64, 64, 3), np.uint8))
    messages = [{"role": "user", "content": [picture, "What?"]}]
    with RendererPool(there) as pool:
        prompt = pool.render(messages, add_generation_prompt=True)
        assert prompt == renderer.render(messages, add_generation_prompt=True)
        stop = renderer.get_stop_token_ids()[-1:]
        given = (prompt.token_ids, stop, [user("And now?")])
        sidecar = prompt.multi_modal_data
        bridge = pool.bridge_to_next_turn(*given, previous_multi_modal_data=sidecar)
        assert bridge is not None
        assert bridge == renderer.bridge_to_next_turn(*given, previous_multi_modal_data=sidecar)


def test_the_bound_on_time_is_that_of_a_call_however_old_the_process():
    # Dozens of short calls: a count of ticks since its start would be wrong by then.
    busy = "{% for a in range(40000) %}{% endfor %}"
    with BoundedProcesses(memory_bytes=MEMORY, cpu_seconds=0.5) as processes:
        template = IsolatedTemplate(busy, processes=processes)
        process, started = asked(processes, os.getpid), 0.0
        while started < 1:
            template.render(RenderRequest(MESSAGES))
            started, _ = spent_by_process(processes)
        assert asked(processes, os.getpid) == process
        child = processes._executor._processes[process]
        ended, _ = spent_by_ended()
        with pytest.raises(TemplateLimitError, match=re.escape("0.5 s of processor time")):
            IsolatedTemplate(OUTSIDE["power"], processes=processes)
        child.join()
        now, _ = spent_by_ended()
        assert 0.4 < now - ended - started < 0.7


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_bound_on_time_is_a_positive_number(seconds):
    with pytest.raises(InputError, match="cpu_seconds: is out of range"):
        BoundedProcesses(cpu_seconds=seconds)


def test_what_ends_a_process_ends_one_call(sentence):
    slow = "{% if messages[0].content == 'x' %}{{ (messages|length + 8) ** (9 ** 9) }}{% endif %}fine"
    with BoundedProcesses(cpu_seconds=0.25) as processes:
        template = IsolatedTemplate(slow, processes=processes)
        request = RenderRequest([Message(role="user", content="x")])
        assert error_of(TemplateLimitError, template.render, request) == sentence
        assert template.render(RenderRequest([Message(role="user", content="y")])) == "fine"
        with pytest.raises(InputError, match="chat_template_kwargs: this value cannot be sent"):
            template.render(RenderRequest(MESSAGES, variables={"helper": lambda: 1}))
    with pytest.raises(PoolClosedError):
        template.render(RenderRequest(MESSAGES))
