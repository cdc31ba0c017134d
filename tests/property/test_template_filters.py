"""Everything a template can do with text gives the text of plain Jinja, and letters stay content (law 7).

Each variable is written in letters of its own, so that any letter in the result says where it must have come
from. Templates are rendered as Transformers renders them and on traced values; both fail, or the texts agree.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.filters import FILTERS

from mmrender.template.filters import LEFT_OUT
from traced_cases import ENVIRONMENT, check_letters, render_both

# Letters that no filter, entity or number writes; among them some whose case mapping changes the length.
ALPHABETS = {"a": "αβγσςΑΒΓΣΐΪ", "b": "жкщЖКЩ", "d": "אבג", "x": "अआइ"}

greek = st.text(st.sampled_from("αβΣΓς\u0390 \t\n<&>'\"-%\\{}.0"), max_size=10)
cyrillic = st.text(st.sampled_from("жКщ ß\nİ,;#"), max_size=6)
VARIABLES = st.fixed_dictionaries(
    {
        "a": greek,
        "b": cyrillic,
        "n": st.integers(-300, 300),
        "f": st.floats(-1e9, 1e9) | st.sampled_from([0.5, 1e300, 2.5]),
        "t": st.booleans(),
        "z": st.none(),
        "x": st.lists(st.text(st.sampled_from("अआ इ<"), max_size=4), max_size=4),
        "d": st.dictionaries(st.sampled_from(["k", "ab", "c d", "1"]), st.text("אב 'ג", max_size=3) | st.integers(0, 3) | st.none() | st.booleans()),
        "y": st.lists(
            st.fixed_dictionaries({"v": st.integers(0, 3), "s": st.sampled_from(["q", "Q", "w"]), "o": st.booleans()}),
            max_size=4,
        ),
    }
)  # fmt: skip

# Arguments for each built-in filter; `list` after those that give a generator.
ARGUMENTS = {
    "abs": [""],
    "attr": ["('upper')", "('k')", "(a)", "('__class__')"],
    "batch": ["(2)|list", "(3, b)|list", "(2, '-')|list", "(0)|list"],
    "capitalize": [""],
    "center": ["", "(15)", "(width=9)", "(b)"],
    "count": [""],
    "d": ["(b)", "(b, true)", ""],
    "default": ["(b)", "('-', boolean=true)"],
    "dictsort": ["", "(true)", "(by='value')", "(reverse=true)"],
    "e": [""],
    "escape": [""],
    "filesizeformat": ["", "(true)"],
    "first": [""],
    "float": ["", "(1.5)"],
    "forceescape": [""],
    "format": ["(b)", "(b, n)", "(k=b)", ""],
    "groupby": ["('s')", "('o')", "('v', default=3)", "('missing')"],
    "indent": ["", "(2)", "(b)", "('>', true)", "(2, true, true)", "(width=1, blank=true)"],
    "int": ["", "(7)", "(0, 16)"],
    "items": ["|list"],
    "join": ["", "(b)", "(',', 's')", "('<', attribute='v')", "(n)"],
    "last": [""],
    "length": [""],
    "list": [""],
    "lower": [""],
    "map": ["('upper')|list", "(attribute='s')|list", "('trim')|join(b)", "('replace', 'अ', b)|list", "('nothing')|list", "(attribute='u', default=b)|list", "('center', 7)|list"],
    "max": ["", "(attribute='v')", "(true)"],
    "min": ["", "(attribute='v')"],
    "pprint": [""],
    "random": [],
    "reject": ["|list", "('none')|list", "('equalto', 'अ')|list"],
    "rejectattr": ["('o')|list", "('s', 'in', ['q'])|list"],
    "replace": ["('α', b)", "('', '-')", "(' ', b, 2)", "('<', a)", "(n, a)"],
    "reverse": ["|list", "|join", ""],
    "round": ["", "(2)", "(1, 'floor')", "(-1)", "(0, 'ceil')"],
    "safe": ["", "~ '<'", "|string|length"],
    "select": ["|list", "('string')|list", "('in', x)|list", "('boolean')|list"],
    "selectattr": ["('o')|list", "('v', '>', 1)|list", "('o', 'true')|list", "('s', 'eq', 'q')|map(attribute='v')|list"],
    "slice": ["(2)|list", "(3, b)|list", "(1)|map('list')|list"],
    "sort": ["", "(true)", "(attribute='v')", "(case_sensitive=true)"],
    "string": [""],
    "sum": ["", "(attribute='v')", "('v', 2)", "(start=x)"],
    "title": [""],
    "tojson": ["", "(true)", "(indent=2)", "(separators=(',', ':'))", "(sort_keys=true, indent=1)", "(indent='--')", "(separators=(',\\n', ': '), indent=2)"],
    "trim": ["", "('αж ')", "(b)"],
    "truncate": ["", "(5)", "(3, true, '')", "(4, true, b, 0)", "(5, end='zz', leeway=0)", "(4, leeway=-1)"],
    "unique": ["|list", "(true)|list", "(attribute='s')|list"],
    "upper": [""],
    "urlencode": [""],
    "wordcount": [""],
    "wordwrap": ["", "(3)", "(4, false)", "(3, true, b)", "(5, wrapstring='|')"],
}  # fmt: skip
VALUES = ("a", "b", "n", "f", "t", "z", "x", "d", "y", "u", "(a ~ b)", "'lit<'", "d.k", "x[0]", "y[0]")
NAMES = sorted(name for name in ARGUMENTS if name != "random")


def test_every_filter_is_tried():
    assert set(ARGUMENTS) == set(FILTERS) - set(LEFT_OUT) <= set(ENVIRONMENT.filters)
    assert not set(LEFT_OUT) & set(ENVIRONMENT.filters)


def check(source, variables):
    text = render_both(source, variables)
    if text is not None:
        check_letters(text, ALPHABETS)


@pytest.mark.parametrize("name", NAMES)
def test_filters_give_what_those_of_jinja_give(name):
    # One rendering for each value and arguments: what fails must fail alone.
    sources = [f"{{{{ {value}|{name}{arguments} }}}}" for value in VALUES for arguments in ARGUMENTS[name]]

    @settings(max_examples=3)
    @given(VARIABLES)
    def run(variables):
        for source in sources:
            check(source, variables)

    run()


ATOMS = ["a", "b", "x", "d", "y", "n", "f", "t", "z", "u", "'0<'", "x[0]", "d.k", "d['c d']", "y[0].s", "[a, b]", "{'k': a, b: x}", "(a, n)"]  # fmt: skip
FORMS = [
    "({0} ~ {1})", "({0} ~ {1} ~ '!')", "({0} + {1})", "({0} + '-' + {1} + {0})", "({0} * 2)", "(3 * {0})", "({0} % {1})", "('%s|%r' % ({0}, {1}))", "('%(k)s' % {0})",
    "'{{}} {{!r}}'.format({0}, {1})", "'{{0:>5}}{{k}}'.format({0}, k={1})", "({0}.format({1}))", "('%-4s.' % {0})",
    "{0}[1:]", "{0}[::-1]", "{0}[-1]", "{0}[:2]", "{0}[n]", "({0} if {1} else 'e')", "({0} or {1})", "({0} and {1})", "(not {0})",
    "({0} == {1})", "({0} in {1})", "({0} is none)", "({0} is string)", "({0} is mapping)", "({0} is boolean)", "({0} is true)", "({0} is integer)", "({0} is sameas true)", "({0} is sameas none)", "({0} is number)",
    "({0} is iterable)", "({0} is sequence)", "({0} is float)", "({0} is eq {1})", "({0} is in {1})", "({0} is defined)",
    "[{0}, {1}]", "[{0}, {1}]|join(', ')", "{{'k': {0}}}", "({0}, {1})", "{0}|string", "{0}|tojson", "{0}|trim", "{0}|upper", "{0}|list", "{0}|first", "{0}|length",
    "{0}|replace('β', {1})", "{0}|indent(2)", "{0}|default({1})", "{0}|join({1})", "{0}|int", "{0}|title", "{0}|reverse|list", "{0}|sort|list",
    "{0}.strip()", "{0}.split({1})", "{0}.split()", "{0}.upper()", "{0}.replace({1}, '+')", "{0}.replace('<', {1})", "{0}.startswith({1})", "{0}.join([{1}, 'k'])", "', '.join({0})", "'='.join([{0}, {1}])",
    "{0}.items()|list", "{0}.keys()", "{0}.values()", "{0}.get('k', {1})", "{0}.lower().title()", "{0}.partition({1})", "{0}.splitlines()", "'.'.center(4, {0})", "({0} > {1})", "-{0}", "({0} // 2)", "({0} - 1)", "{0}.rstrip('Σ')", "{0}.count('α')",
]  # fmt: skip
expressions = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: st.builds(
        lambda form, one, two: form.format(one, two), st.sampled_from(FORMS), inner, inner
    ),
    max_leaves=4,
)


@settings(max_examples=80)
@given(expressions, VARIABLES)
def test_expressions_give_what_those_of_jinja_give(expression, variables):
    check(f"{{{{ {expression} }}}}", variables)
    check(
        f"{{% set v = {expression} %}}{{{{ v }}}}{{% if v %}}!{{% endif %}}{{% for c in v %}}[{{{{ c }}}}]{{% endfor %}}",
        variables,
    )


@settings(max_examples=30)
@given(expressions, expressions, VARIABLES)
def test_blocks_print_what_those_of_jinja_print(one, two, variables):
    check(
        f"{{%- macro m(p, q=a) -%}}<{{{{ p }}}}|{{{{ q }}}}|{{{{ varargs|join }}}}|{{{{ kwargs }}}}>{{%- endmacro -%}}"
        f"{{{{ m({one}) }}}}{{{{ m({two}, {one}, 'v', k=b) }}}}{{{{ m(q=b, p='')|upper }}}}",
        variables,
    )
    check(
        f"{{% macro w() %}}({{{{ caller({one}) }}}}){{% endmacro %}}{{% call(v) w() %}}{{{{ v }}}} and {{{{ {two} }}}}{{% endcall %}}",
        variables,
    )
    check(
        f"{{% set v %}}\n {{{{ {one} }}}} {{% if t %}}{{{{ {two} }}}}{{% endif %}}{{% endset %}}{{{{ v|trim }}}}{{{{ v|length }}}}",
        variables,
    )
    check(f"{{% set v | upper | replace('-', b) %}}{{{{ {one} }}}}-{{% endset %}}{{{{ v }}}}", variables)
    check(f"{{% filter trim | indent(1) %}} {{{{ {one} }}}}\n{{{{ {two} }}}} {{% endfilter %}}", variables)
    check(
        f"{{% set ns = namespace(v={one}, w='') %}}{{% for c in [1, 2] %}}{{% set ns.w = ns.w ~ ns.v ~ loop.index %}}{{% endfor %}}{{{{ ns.w }}}}",
        variables,
    )
    check(f"{{% generation %}}{{{{ {one} }}}}{{% set v = 1 %}}{{% endgeneration %}}{{{{ v }}}}", variables)
    check(
        f"{{% with v = {one} %}}{{{{ v }}}}{{% endwith %}}{{% block q %}}{{{{ a }}}}{{% endblock %}}{{{{ self.q() }}}}",
        variables,
    )


LOOPS = [
    "{% for c in x %}{{ loop.index }}/{{ loop.length }}{{ c }}{% if not loop.last %}, {% endif %}{% else %}none{% endfor %}",
    "{% for c in x %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ c }}{% if loop.index0 == 2 %}{% break %}{% endif %}{% endfor %}",
    "{% for c in x if c|length > 1 %}{{ loop.first }}{{ loop.last }}{{ loop.revindex }}{{ loop.previtem }}{{ c }}{{ loop.nextitem }}{% endfor %}",
    "{% for k, v in d.items() %}{{ k }}={{ v }}{{ loop.cycle('-', b) }}{% endfor %}",
    "{% for k in d %}{{ k }}:{{ d[k] }};{% endfor %}{% for k, v in d|dictsort %}{{ k ~ v }}{% endfor %}",
    "{% for row in y %}{{ row.v }}{{ row['s'] }}{{ row.o }}{{ row }}{{ row|tojson }}{% endfor %}",
    "{% for g in y|groupby('s') %}{{ g.grouper }}{{ g.list }}{{ g }}{% endfor %}",
    "{% for c in a %}<{{ c }}>{% endfor %}{% for c in a|reverse %}{{ c }}{% endfor %}",
    "{% for c in x recursive %}{{ c }}{% if loop.depth < 3 %}({{ loop(x[1:]) }}){% endif %}{{ loop.depth0 }}{% endfor %}",
    "{% for c in x %}{% for e in x %}{{ loop.index }}{{ c ~ e }}{% endfor %}{{ loop.changed(c) }}{% endfor %}",
    "{% for i in range(n % 4) %}{{ i }}{{ a[i] }}{{ x[i] }}{% endfor %}",
    "{% for row in x|batch(2, b) %}{{ row|join('+') }};{% endfor %}{% for row in x|slice(2) %}{{ row }}{% endfor %}",
    "{% set ns = namespace(found=false, s='') %}{% for c in x %}{% if not ns.found %}{% set ns.s = ns.s + c %}{% endif %}{% set ns.found = true %}{% endfor %}{{ ns.s }}{{ ns }}",
    "{% set c = cycler(a, b) %}{{ c.next() }}{{ c.current }}{{ c.next() }}{% set j = joiner(b) %}{% for e in x %}{{ j() }}{{ e }}{% endfor %}",
    "{{ dict(k=a, l=b) }}{{ dict(d, q=a).items()|list }}{{ dict([(a, b)]) }}",
    "{{ [a, b, n, f, t, z, x, d, y] }}{{ (a,) }}{{ {'t': t, 'z': z, a: b} }}",
    "{{ [a, b, n, f, t, z, x, d, y]|tojson }}{{ {'d': d, 'y': y, 'a': a}|tojson(indent=2) }}",
    "{{ t }}{{ not t }}{{ t|int }}{{ t + 1 }}{{ t ~ z }}{{ z }}{{ '%s %d' % (t, t) }}{{ t == true }}{{ z == none }}{{ [t, z] }}",
    "{{ n }}{{ n + 1 }}{{ n * 2 }}{{ n / 4 }}{{ n // 3 }}{{ n % 7 }}{{ -n }}{{ n|abs }}{{ '%05d|%x' % (n, n|abs) }}{{ '{:+}'.format(n) }}{{ n|string }}",
    "{{ f }}{{ f|round(1) }}{{ f|int }}{{ '%.2f' % f }}{{ '{:.1e}'.format(f) }}{{ f * 2 }}{{ f|tojson }}{{ [f] }}",
    "{{ d }}{{ d.k }}{{ d['c d'] }}{{ d.missing }}{{ d.missing is defined }}{{ d|length }}{{ 'k' in d }}{{ d|items|list }}",
    "{{ a.split('<')[0] }}{{ a.split('<')[-1].lstrip('\\n') }}{{ (a ~ '</think>' ~ b).split('</think>')[-1].strip() }}",
    "{{- a -}}\n  {{- b }} \n{% if t -%}  {{ a }}  {%- else %} {{ b }}{%+ endif %}\n\n",
    "{{ '%s' % a }}{{ a % () }}{{ a|format() }}{{ '%s%s' % (a, b) }}{{ 'abc'|replace('b', a) }}{{ 'b'.replace('b', a) }}{{ b.join(['1', '2']) }}",
    "{{ a|upper|lower|title|capitalize|trim|center(30) }}{{ (a ~ b)|upper|replace('Ж', a)|list|join('/') }}",
]  # fmt: skip


@pytest.mark.parametrize("source", LOOPS)
def test_statements_print_what_those_of_jinja_print(source):
    settings(max_examples=10)(given(VARIABLES)(lambda variables: check(source, variables)))()


def test_numbers_and_singletons_keep_their_origin():
    variables = {"n": 7, "f": 2.5, "t": True, "z": None, "d": {"k": [1, {"m": None}], "l": False}, "a": "α"}
    for source, expected in {
        "{{ n }}": [(0, 1, "n")],
        "<{{ n }}>": [(1, 2, "n")],
        "{{ t }}{{ z }}{{ f }}": [(0, 4, "t"), (4, 8, "z"), (8, 11, "f")],
        "{{ t ~ ',' ~ z }}": [(0, 4, "t"), (5, 9, "z")],
        "{{ '%s=%s' % (n, t) }}": [(0, 6, "several messages")],
        "{{ '%03d' % n }}": [(0, 3, "n")],
        "{{ '{}{:>3}'.format(t, a) }}": [(0, 7, "several messages")],
        "{{ t|string|lower }}": [(0, 4, "t")],
        "{{ t|tojson }}{{ z|tojson }}": [(0, 4, "t"), (4, 8, "z")],
        "{{ d.k }}": [(0, 16, "d")],
        "{{ d.k|tojson }}": [(0, 16, "d")],
        "{{ [n, 'x', t]|tojson }}": [(0, 14, "several messages")],
        "{{ {'q': a}|tojson }}": [(0, 10, "a")],
        "{{ [a, 1] }}": [(0, 8, "a")],
        "{{ d.k[0] }}{{ d.l }}{{ d['k'][1].m }}": [(0, 10, "d")],
    }.items():
        text = render_both(source, variables)
        found = [(start, stop, origin.path) for start, stop, origin in text.spans]
        assert found == expected, (source, str(text))
