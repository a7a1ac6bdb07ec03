"""Hostile templates: nothing executed, nothing escaped, every one refused quickly and within bounded memory."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from localllm.errors import TemplateError
from localllm.models.chat_template import MAX_SOURCE_BYTES, ChatTemplate
from localllm.models.template.meter import Limits

DAG = "{% set ns = namespace(s=[0]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}"
TUPLES = "{% set ns = namespace(s=(0,)) %}{% for i in range(60) %}{% set ns.s = (ns.s, ns.s) %}{% endfor %}"

ESCAPES = {
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "class as item": "{{ ''['__class__'] }}",
    "class by attr": "{{ ''|attr('__class__') }}",
    "class by joined name": "{{ ''|attr('__cl' ~ 'ass__') }}",
    "class by map": "{{ ['']|map(attribute='__class__')|list }}",
    "class by nested map": "{{ [messages]|map(attribute='0.__class__')|list }}",
    "class by selectattr": "{{ [messages]|selectattr('__class__')|list }}",
    "class by sort": "{{ [messages[0]]|sort(attribute='__class__') }}",
    "class by groupby": "{{ [messages[0]]|groupby('__class__') }}",
    "class by sum": "{{ [messages[0]]|sum(attribute='__class__') }}",
    "class by join": "{{ [messages[0]]|join('', attribute='__class__') }}",
    "format attribute": "{{ '{0.__class__}'.format('') }}",
    "format item": "{{ '{0[__class__]}'.format('') }}",
    "format_map": "{{ '{x.__class__.__mro__}'.format_map({'x': ''}) }}",
    "format by attr filter": "{{ ('{0.__class__}'|attr('format'))('x') }}",
    "format by item": "{{ ('{0.__class__}'['format'])('x') }}",
    "format in nested width": "{{ '{:{0.__class__}}'.format('x') }}",
    "function globals": "{{ raise_exception.__globals__ }}",
    "function closure": "{{ range.__closure__[0].cell_contents }}",
    "namespace init": "{{ namespace.__init__.__globals__ }}",
    "date globals": "{{ strftime_now.__globals__['sys'] }}",
    "cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "joiner": "{{ joiner.__init__.__globals__ }}",
    "lipsum": "{{ lipsum.__globals__['os'].popen('id') }}",
    "self": "{{ self.__init__.__globals__ }}",
    "self context": "{{ self._TemplateReference__context.environment }}",
    "macro function": "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "macro environment": "{% macro m() %}{% endmacro %}{{ m._environment }}",
    "loop iterator": "{% for x in [1] %}{{ loop._iterator.__class__ }}{% endfor %}",
    "loop undefined class": "{% for x in [1] %}{{ loop._undefined }}{% endfor %}",
    "undefined class": "{{ nothing.__class__ }}",
    "generator frame": "{{ (messages|map('length')).gi_frame.f_globals }}",
    "namespace attribute": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "namespace argument": "{{ namespace(__class__=1) }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "from import": "{% from 'os' import system %}",
    "extends": "{% extends 'x' %}",
    "autoescape": "{% autoescape true %}{{ messages }}{% endautoescape %}",
    "debug": "{% debug %}",
    "list append": "{% set l = [] %}{{ l.append(1) }}",
    "dict update": "{{ messages[0].update({'role': 'x'}) }}",
    "dict fromkeys": "{{ messages[0].fromkeys('ab') }}",
    "encode": "{{ 'x'.encode('utf-16') }}",
    "translate": "{{ 'x'.translate({120: 'y'}) }}",
    "int method": "{{ (1).to_bytes(1000000000, 'big') }}",
    "call of a number": "{{ (1)() }}",
    "print of a macro": "{% macro m() %}{% endmacro %}{{ m }}",
    "print of a function": "{{ raise_exception }}",
    "print of a method": "{{ ''.upper }}",
}

BOMBS = {
    "string times": "{{ 'a' * 1000000000 }}",
    "times string": "{{ 1000000000 * 'a' }}",
    "growing": "{% set ns = namespace(s='a'*1000) %}{% for i in range(100) %}{% set ns.s = ns.s * 10 %}{% endfor %}",
    "doubling": "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "doubling by tilde": (
        "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"
    ),
    "doubling of user text": (
        "{% set ns = namespace(s=messages[0].content) %}"
        "{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"
    ),
    "list times": "{{ ([0] * 1000000000)|length }}",
    "list doubling": "{% set ns = namespace(s=[0]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "shared lists printed": DAG + "{{ ns.s }}",
    "shared lists as json": DAG + "{{ ns.s|tojson }}",
    "shared lists compared": DAG + "{% set t = namespace(s=ns.s) %}" + DAG + "{{ ns.s == t.s }}",
    "shared lists joined": DAG + "{{ ns.s|join }}",
    "shared lists by percent": DAG + "{{ '%s' % (ns.s,) }}",
    "shared lists by format": DAG + "{{ '{}'.format(ns.s) }}",
    "shared lists tested": DAG + "{{ ns.s is lower }}",
    "shared lists raised": DAG + "{{ raise_exception(ns.s) }}",
    "shared lists in a view": DAG + "{{ {'a': ns.s}.items() }}",
    "shared lists in a namespace": DAG + "{{ [ns] }}",
    "shared tuples as key": TUPLES + "{{ {ns.s: 1} }}",
    "shared tuples looked up": TUPLES + "{{ {}[ns.s] }}",
    "shared tuples searched": TUPLES + "{{ ns.s in {} }}",
    "shared tuples got": TUPLES + "{{ {}.get(ns.s) }}",
    "shared tuples unique": TUPLES + "{{ [ns.s]|unique|list }}",
    "shared tuples in dict()": TUPLES + "{{ dict([(ns.s, 1)]) }}",
    "shared tuples named undefined": TUPLES + "{{ [][ns.s].x }}",
    "shared tuples in namespaces": TUPLES + "{{ [ns]|unique(attribute='s')|list }}",
    "shared tuples in namespaces sorted": TUPLES + "{{ [[ns], [ns]]|sort(attribute='0.s') }}",
    "shared lists in an error": DAG + "{{ [1].index([ns]) }}",
    "shared lists as filter argument": DAG + "{{ 'x'|truncate(5, ns.s, ns.s) }}{{ ns }}",
    "shared lists as a missing name": DAG + "{{ {}[ns.s].x }}",
    "power": "{{ 2 ** 100000000 }}",
    "products": "{% set ns = namespace(n=10) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "percent precision": "{{ '%.1000000000f' % 1 }}",
    "format width": "{{ '{:>1000000000}'.format('') }}",
    "format nested width": "{{ '{:>{}}'.format('', 1000000000) }}",
    "format filter": "{{ '%1000000000s'|format('x') }}",
    "format of many": "{{ ('{0}' * 30000).format('x' * 30000) }}",
    "percent of many": "{{ ('%(a)s' * 30000) % {'a': 'x' * 30000} }}",
    "center": "{{ 'a'|center(1000000000) }}",
    "ljust": "{{ 'a'.ljust(1000000000) }}",
    "zfill": "{{ 'a'.zfill(1000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(1000000000) }}",
    "replace": "{{ ('a'*100000).replace('a', 'b'*100000) }}",
    "replace filter": "{{ ('a'*100000)|replace('a', 'b'*100000) }}",
    "join": "{{ range(1000)|join('a'*1000000) }}",
    "join method": "{{ ('a'*1000000).join(['b']*1000) }}",
    "indent": "{{ 'a'|indent(1000000000, true) }}",
    "indent of lines": "{{ ('a\n'*100000)|indent(100000) }}",
    "json indent": "{{ {'a': 1}|tojson(indent=1000000000) }}",
    "json separators": "{{ ([1]*1000)|tojson(separators=('a'*1000000, 'b')) }}",
    "batch": "{{ [1]|batch(1000000000, 'x')|list }}",
    "slice": "{{ [1]|slice(1000000000)|list }}",
    "round": "{{ 1|round(1000000000, 'floor') }}",
    "big integer": "{% set n = ('1'*1000000)|int(base=2) %}{{ n * n }}",
    "range": "{{ range(1000000000)|list }}",
    "nested loops": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "loops that write": "{% for a in range(100000) %}{% for b in range(100000) %}x{% endfor %}{% endfor %}",
    "loops in a macro": (
        "{% macro m() %}{% for a in range(9999) %}{% for b in range(9999) %}xxxxxxxx{% endfor %}{% endfor %}"
        "{% endmacro %}{{ m() }}"
    ),
    "loops over text": "{% for a in 'x' * 100000 %}{% for b in 'x' * 100000 %}{% endfor %}{% endfor %}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "branching recursion": ("{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}"),
    "recursive loop": "{% for a in range(1000) recursive %}{{ loop(range(1000)) }}{% endfor %}",
    "recursive block": "{% block b %}{{ self.b() }}{% endblock %}",
    "nested parentheses": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "nested lists": "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "nested ifs": "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
    "nested fors": "{% for a in [1] %}" * 200 + "{% endfor %}" * 200,
    "nots": "{{ " + "not " * 5000 + "1 }}",
    "sums": "{{ " + "+".join(["1"] * 5000) + " }}",
    "filters": "{{ 'a'" + "|upper" * 5000 + " }}",
    "attributes": "{{ messages" + ".a" * 5000 + " }}",
    "elifs": "{% if 0 %}" + "{% elif 0 %}" * 3000 + "{% endif %}",
    "outputs": "{{a}}" * 50000,
    "lists made in a loop": (
        "{% set ns = namespace(x=0) %}{% for a in range(100000) %}{% set ns.x = [ns.x, ["
        + "1," * 3000
        + "]] %}{% endfor %}"
    ),
    "comparisons": (
        "{% set a = 'x' * 9000000 %}{% set b = 'x' * 8999999 ~ 'x' %}"
        "{% for i in range(100000) %}{{ a == b }}{% endfor %}"
    ),
    "slices": "{% set a = 'x' * 1000000 %}{% for i in range(100000) %}{% set b = a[1:] %}{% endfor %}",
    "search in a list": "{% set a = 'x' * 100000 %}{% set b = 'x' * 99999 ~ 'y' %}{{ b in [a] * 100000 }}",
    "split": "{% for i in range(1000) %}{% set x = ('a ' * 1000000).split(' ') %}{% endfor %}",
    "sort": (
        "{% set ns = namespace(l=[]) %}{% for i in range(500) %}{% set ns.l = ns.l + ['x' * 10000 ~ i] %}{% endfor %}"
        "{% for i in range(1000) %}{{ ns.l|sort|length }}{% endfor %}"
    ),
    "output": "{% for i in range(2000) %}{{ 'x' * 1000 }}{% endfor %}",
    "big source": "x" * (MAX_SOURCE_BYTES + 1),
    "date": "{{ strftime_now('%c' * 100000) }}",
    "words": "{% for i in range(100000) %}{{ ('a b ' * 10000)|wordcount }}{% endfor %}",
    "set block": (
        "{% for i in range(9999) %}{% set x %}{% for j in range(9999) %}yyyyyyyy{% endfor %}{% endset %}{% endfor %}"
    ),
}

_CHILD = """
import json, resource, sys, time
from localllm.errors import TemplateError
from localllm.models.chat_template import ChatTemplate
results = {}
def peak():
    try:  # what getrusage says counts the process that forked this one, too
        return int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
ChatTemplate("{{ 1 }}", specials=()).render([{"role": "user", "content": "hi"}], max_chars=9)
for name, source in json.load(sys.stdin).items():
    before, start = peak(), time.perf_counter()
    try:
        ChatTemplate(source, specials=["<s>"]).render([{"role": "user", "content": "hi"}], max_chars=100_000)
        outcome = "rendered"
    except TemplateError as error:
        outcome = "refused: " + error.message[:200]
    except BaseException as error:
        outcome = f"{type(error).__name__}: {error}"[:200]
    results[name] = [outcome, time.perf_counter() - start, peak() - before]
json.dump(results, sys.stdout)
"""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, tuple[str, float, int]]:
    """What became of every hostile template in a process of its own: outcome, seconds, growth of the peak."""
    child = subprocess.run(
        [sys.executable, "-c", _CHILD],
        input=json.dumps(ESCAPES | BOMBS),
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).resolve().parents[2],
        timeout=280,
    )
    return {name: tuple(result) for name, result in json.loads(child.stdout).items()}


@pytest.mark.parametrize("name", [*ESCAPES, *BOMBS])
def test_hostile_template_is_refused_quickly_in_bounded_memory(
    outcomes: dict[str, tuple[str, float, int]], name: str
) -> None:
    outcome, seconds, grown = outcomes[name]
    assert outcome.startswith("refused: ")
    assert seconds < 2.0
    assert grown < 160 * 1024  # KiB


def _render(source: str, **limits: float) -> str:
    template = ChatTemplate(source, specials=(), limits=Limits(**limits) if limits else None)  # type: ignore[arg-type]
    return template.render([{"role": "user", "content": "hi"}], max_chars=1000).plain


def test_output_limit_counts_characters() -> None:
    assert len(_render("{{ 'x' * 1000 }}")) == 1000
    with pytest.raises(TemplateError, match="writes more than 1000 characters"):
        _render("{{ 'x' * 1001 }}")


def test_deadline_is_looked_at_inside_loops() -> None:
    with pytest.raises(TemplateError, match=r"longer than 0\.05 s"):
        _render("{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}", seconds=0.05)


def test_a_refused_rendering_leaves_the_template_usable() -> None:
    template = ChatTemplate("{{ 'x' * messages[0].content|int }}", specials=())
    with pytest.raises(TemplateError):
        template.render([{"role": "user", "content": "1000000000"}], max_chars=1000)
    assert template.render([{"role": "user", "content": "3"}], max_chars=1000).plain == "xxx"


def test_the_callers_messages_cannot_be_changed() -> None:
    message = {"role": "user", "content": "hi", "tags": ["a"]}
    with pytest.raises(TemplateError, match="unsafe"):
        ChatTemplate("{{ messages[0].tags.append('b') }}", specials=()).render([message], max_chars=100)
    assert message == {"role": "user", "content": "hi", "tags": ["a"]}


def test_threads_take_turns_on_one_template() -> None:
    template = ChatTemplate("{% for i in range(200) %}{{ messages[0].content }}{% endfor %}", specials=())
    results: list[str] = []

    def render(text: str) -> None:
        results.extend(template.render([{"role": "user", "content": text}], max_chars=10_000).plain for _ in range(20))

    threads = [threading.Thread(target=render, args=(letter,)) for letter in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == sorted([letter * 200 for letter in "abcd"] * 20)


def test_jinja_is_not_imported_before_the_first_rendering() -> None:
    code = "import sys; import localllm.models.chat_template; sys.exit('jinja2' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).resolve().parents[3])
    assert done.returncode == 0
