"""Hostile templates end, soon and without much memory (case F1, second part)."""

# ruff: noqa: E501 (a template reads best on one line)

import resource
import sys
import time

import pytest
from jinja2.exceptions import SecurityError, TemplateAssertionError

from ropewalk.errors import TemplateError
from ropewalk.text.budget import BudgetExceededError
from ropewalk.text.chat import ChatTemplate

USER = [{"role": "user", "content": "x" * 10_000}]
MUCH = "0123456789" * 100


def growing(step: str, times: int = 100, start: str = "'ab'") -> str:
    """A template that applies a step to ns.x again and again."""
    return f"{{% set ns = namespace(x={start}) %}}{{% for i in range({times}) %}}{step}{{% endfor %}}"


HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested loops with a filter": "{% for a in range(99999) %}{% for b in range(99999) if b > a * 9 %}{% endfor %}{% endfor %}",
    "loops in a captured block": "{% set x %}{% for a in range(99999) %}{% for b in range(99999) %}y{% endfor %}{% endfor %}{% endset %}",
    "literal text in a loop": "{% set x %}{% for a in range(99999) %}" + MUCH + "{% endfor %}{% endset %}",
    "literal text in macros": "{% macro f() %}" + MUCH + "{% endmacro %}{% set x %}{% for a in range(99999) %}{{ f() }}{% endfor %}{% endset %}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1, 1, 1]) }}{% endfor %}",
    "wide recursive loop": "{% for x in range(999) recursive %}{% if loop.depth < 9 %}{{ loop(range(999)) }}{% endif %}{% endfor %}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "branching macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "block that calls itself": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "caller chain": "{% macro f(n) %}{{ caller() }}{{ caller() }}{% endmacro %}{% macro g(n) %}{% if n %}{% call f(n) %}{{ g(n - 1) }}{% endcall %}{% endif %}{% endmacro %}{{ g(60) }}",
    "string times number": "{{ 'x' * 10 ** 9 }}",
    "number times string": "{{ 1000000000 * 'x' }}",
    "list times number": "{{ ([1] * 10 ** 9) | length }}",
    "tuple times number": "{{ ((1,) * 10 ** 9) | length }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "repeated squaring": growing("{% set ns.x = ns.x * ns.x %}", start="7"),
    "doubling by plus": growing("{% set ns.x = ns.x + ns.x %}"),
    "doubling by tilde": growing("{% set ns.x = ns.x ~ ns.x %}"),
    "doubling by capture": growing("{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
    "doubling by join": growing("{% set ns.x = [ns.x, ns.x] | join %}"),
    "doubling by method join": growing("{% set ns.x = ''.join([ns.x, ns.x]) %}"),
    "doubling by replace": growing("{% set ns.x = ns.x | replace('a', 'aaaa') %}"),
    "doubling by method replace": growing("{% set ns.x = ns.x.replace('a', ns.x) %}"),
    "doubling by empty replace": growing("{% set ns.x = ns.x.replace('', ns.x) %}"),
    "doubling by format": growing("{% set ns.x = '%s%s' % (ns.x, ns.x) %}"),
    "doubling by format filter": growing("{% set ns.x = '%s%s' | format(ns.x, ns.x) %}"),
    "doubling by format method": growing("{% set ns.x = '{0}{0}'.format(ns.x) %}"),
    "doubling lists": growing("{% set ns.x = ns.x + ns.x %}", start="[1]"),
    "doubling by macro": "{% macro d(s) %}{{ s }}{{ s }}{% endmacro %}" + growing("{% set ns.x = d(ns.x) %}"),
    "doubling by filter block": growing("{% set y %}{% filter trim %}{{ ns.x }}{{ ns.x }}{% endfilter %}{% endset %}{% set ns.x = y %}"),
    "list in itself, put out": growing("{% set ns.x = [ns.x, ns.x] %}") + "{{ ns.x }}",
    "list in itself, as JSON": growing("{% set ns.x = [ns.x, ns.x] %}") + "{{ ns.x | tojson }}",
    "list in itself, compared": growing("{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}") + "{{ ns.x == ns.y }}",
    "list in itself, searched": growing("{% set ns.x = [ns.x, ns.x] %}") + "{{ 'q' in ns.x }}{{ [ns.x] in [ns.x] }}",
    "list in itself, tested": growing("{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}") + "{{ ns.x is eq ns.y }}",
    "list in itself, formatted": growing("{% set ns.x = [ns.x, ns.x] %}") + "{{ '%s' % ns.x }}",
    "list in itself, raised": growing("{% set ns.x = [ns.x, ns.x] %}") + "{{ raise_exception(ns.x) }}",
    "tuple in itself, as a key": growing("{% set ns.x = (ns.x, ns.x) %}") + "{{ {ns.x: 1} }}",
    "tuple in itself, looked up": growing("{% set ns.x = (ns.x, ns.x) %}") + "{{ {}[ns.x] }}",
    "tuple in itself, made unique": growing("{% set ns.x = (ns.x, ns.x) %}") + "{{ [ns.x] | unique | list }}",
    "dict in itself": growing("{% set ns.x = {'a': ns.x, 'b': ns.x} %}") + "{{ ns.x | string }}",
    "namespace in itself": growing("{% set ns.x = namespace(a=ns.x, b=ns.x) %}") + "{{ ns.x }}",
    "cycle of namespaces": "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
    "center": "{{ 'x' | center(1000000000) }}",
    "method center": "{{ 'x'.center(1000000000) }}",
    "ljust": "{{ 'x'.ljust(1000000000) }}",
    "zfill": "{{ 'x'.zfill(1000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(1000000000) }}",
    "center in map": "{{ ['x'] | map('center', 1000000000) | join }}",
    "indent": "{{ 'x\ny' | indent(1000000000) }}",
    "indent of many lines": "{{ ('\n' * 99999) | indent(9999, blank=true) }}",
    "indent by a text": "{{ ('\n' * 99999) | indent('x' * 9999, blank=true) }}",
    "wordwrap": "{{ ('x' * 99999) | wordwrap(1, wrapstring='y' * 99999) }}",
    "join with a long separator": "{{ range(99999) | join('x' * 99999) }}",
    "batch": "{{ [1] | batch(1000000000, 'x') | list }}",
    "slice": "{{ [1] | slice(1000000000) | list }}",
    "round": "{{ 1 | round(1000000000, 'ceil') }}",
    "format width": "{{ '%1000000000d' % 1 }}",
    "format precision": "{{ '%.1000000000f' % 1 }}",
    "format star": "{{ '%*d' % (1000000000, 1) }}",
    "format width of a named field": "{{ '%(a)1000000000d' % {'a': 1} }}",
    "format method width": "{{ '{:1000000000}'.format(1) }}",
    "format method width as argument": "{{ '{:{}}'.format(1, 1000000000) }}",
    "format_map width": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "format filter width": "{{ '%1000000000d' | format(1) }}",
    "JSON indent": "{{ [1] | tojson(indent=1000000000) }}",
    "JSON indent of deep lists": "{% set ns = namespace(x=[1] * 9999) %}{% for i in range(400) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson(indent=16) }}",
    "sum of lists": "{{ ([[1] * 900] * 900) | sum(start=[]) }}",
    "long number": "{{ ('9' * 9999999) | int(0, 16) }}",
    "many slices of one text": "{% set s = 'x' * 9999999 %}{% set l = [" + "s[1:], " * 5000 + "] %}",
    "upper in a list": "{% set s = 'x' * 9999999 %}{% set l = [" + "s.upper(), " * 5000 + "] %}",
    "references to one text, joined": "{% set s = 'x' * 999999 %}{{ ([s] * 9999) | join }}",
    "generator of one text": "{% set s = 'x' * 999999 %}{{ range(99999) | map('string') | map('replace', '1', s) | join }}",
    "one argument in many fields": "{% set s = 'x' * 999999 %}{{ ('{0}' * 3000).format(s) }}",
    "one value in many percent fields": "{% set s = 'x' * 999999 %}{{ ('%(a)s' * 1900) % {'a': s} }}",
    "one value in many filter fields": "{% set s = 'x' * 999999 %}{{ ('%(a)s' * 1900) | format(a=s) }}",
    "width by keyword": "{{ ('x' | safe).center(width=1000000000) }}",
    "replace by keyword": growing("{% set ns.x = ns.x.replace(old='', new=ns.x) %}", start="'ab' | safe"),
    "lists of words": "{% set s = 'x ' * 3999999 %}{% set l = [" + "s.split(), " * 500 + "] %}",
    "lists of pieces": "{% set s = 'x,' * 3999999 %}{% set l = [" + "s.split(','), " * 500 + "] %}",
    "lists of characters": "{% set s = 'x' * 6999999 %}{% set l = [" + "s | list, " * 500 + "] %}",
    "percent escapes": "{% set s = '😀' * 999999 %}{% set l = [" + "s | urlencode, " * 500 + "] %}",
    "lipsum": "{{ lipsum(n=1000000000) }}",
    "deep parentheses": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "deep lists": "{{ " + "[" * 50_000 + "]" * 50_000 + " }}",
    "long sum": "{{ 1" + " + 1" * 30_000 + " }}",
    "deep ifs": "{% if 1 %}" * 5_000 + "{% endif %}" * 5_000,
    "long source": "x" * 200_000,
}  # fmt: skip


STOPPED = (BudgetExceededError, SecurityError, TemplateAssertionError, RecursionError)


def peak_bytes() -> int:
    """The most memory that this process has had so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


@pytest.mark.parametrize("name", HOSTILE)
def test_f1_hostile_templates_end(name, monkeypatch):
    """Within the limits of `budget`, here with less time to save some."""
    monkeypatch.setattr("ropewalk.text.budget.MAX_SECONDS", 0.5)
    before, started = peak_bytes(), time.process_time()
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(HOSTILE[name]).render(USER)
    assert isinstance(caught.value.__cause__, STOPPED), caught.value
    assert time.process_time() - started < 60
    assert peak_bytes() - before < 400_000_000


def test_the_clock_stops_what_steps_do_not(monkeypatch):
    monkeypatch.setattr("ropewalk.text.budget.MAX_SECONDS", 0.05)
    with pytest.raises(TemplateError, match=r"takes longer than 0\.05 seconds") as caught:
        ChatTemplate(HOSTILE["nested loops"]).render(USER)
    assert isinstance(caught.value.__cause__, BudgetExceededError)


def test_long_conversations_are_well_within_the_limits(monkeypatch):
    """2000 messages of 2 kB each, with the operations that real templates use; of time this machine takes its own."""
    monkeypatch.setattr("ropewalk.text.budget.MAX_SECONDS", 300.0)
    source = (
        "{% set ns = namespace(text='', seen=[]) %}{% for m in messages %}{% if messages | length > 1 and m.role == 'user' %}"
        "{% set content = m.content | trim %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{% set ns.seen = ns.seen + [m] %}"
        "{% elif m.content is string %}{{ m.content.strip() ~ eos_token }}{% endif %}{% if loop.last %}{{ m | tojson }}{% endif %}{% endfor %}"
    )
    messages = [
        {"role": "user" if i % 2 == 0 else "assistant", "content": f"{i} " * 500} for i in range(2000)
    ]
    text = ChatTemplate(source, eos_token="</s>").render(messages)
    assert len(text) > sum(len(m["content"]) for m in messages)
