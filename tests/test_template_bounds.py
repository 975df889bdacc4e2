"""A chat template is a foreign program: it reaches nothing but its messages, and it ends."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from bgmpi.errors import InputError
from bgmpi.io import template_bounds
from bgmpi.io.chat_template import ChatRefused, ChatTemplate

MESSAGES = [{"role": "user", "content": "hi"}]
#: Bytes of address space that one rendering may take beyond what the process has.
ROOM = 3 << 30


@pytest.fixture(autouse=True)
def little_room() -> Iterator[None]:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def rendered(text: str, **variables: object) -> str:
    return ChatTemplate({"default": text}, now=datetime(2026, 1, 2)).render(MESSAGES, None, None, True, variables)


DOUBLING = "{% set ns = namespace(x='ab', l=[]) %}{% for i in range(60) %}{% set ns.x = BODY %}{% endfor %}{{ ns.x }}"
ENDLESS = {
    "many turns": "{% for i in range(10**12) %}x{% endfor %}",
    "loops in loops": "{% for a in range(60000) %}{% for b in range(60000) %}{% endfor %}{% endfor %}",
    "a loop over a filter": "{% for a in range(60000) %}"
                            "{% for b in range(60000)|map('string') %}{% endfor %}{% endfor %}",
    "a recursive loop": "{% for a in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "macros that call themselves": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
                                         "{{ f(40) }}",
    "a long text": "{{ 'x' * 10**12 }}", "a long text backwards": "{{ 10**12 * 'x' }}",
    "a long list": "{{ [1] * 10**10 }}",
    "doubling by +": DOUBLING.replace("BODY", "ns.x + ns.x"), "doubling by ~": DOUBLING.replace("BODY", "ns.x ~ ns.x"),
    "doubling by join": DOUBLING.replace("BODY", "[ns.x, ns.x]|join"),
    "doubling by a method": DOUBLING.replace("BODY", "''.join([ns.x, ns.x])"),
    "growing by replace": DOUBLING.replace("BODY", "ns.x|replace('a', ns.x)"),
    "growing by a method replace": DOUBLING.replace("BODY", "ns.x.replace('a', ns.x)"),
    "doubling by a format": DOUBLING.replace("BODY", "'%s%s' % (ns.x, ns.x)"),
    "doubling by a format method": DOUBLING.replace("BODY", "'{0}{0}'.format(ns.x)"),
    "doubling by a format filter": DOUBLING.replace("BODY", "'%s%s'|format(ns.x, ns.x)"),
    "doubling by output": DOUBLING.replace("{% set ns.x = BODY %}", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
    "doubling a list": DOUBLING.replace("BODY", "ns.x|list + ns.x|list"),
    "lists in lists, written": DOUBLING.replace("BODY", "[ns.x, ns.x]"),
    "lists in lists, as JSON": DOUBLING.replace("BODY", "[ns.x, ns.x]").replace("{{ ns.x }}", "{{ ns.x|tojson }}"),
    "lists in lists, joined": DOUBLING.replace("BODY", "[ns.x, ns.x]").replace("{{ ns.x }}", "{{ [ns.x]|join }}"),
    "lists in lists, ~": DOUBLING.replace("BODY", "[ns.x, ns.x]").replace("{{ ns.x }}", "{% set y = ns.x ~ '' %}"),
    "many large slices": "{% set big = 'x' * 60000000 %}{% set ns = namespace(l=[]) %}{% for i in range(60000) %}"
                         "{% set ns.l = ns.l + [big[1:]] %}{% endfor %}",
    "a wide format": "{{ '%1000000000d' % 1 }}", "a wide format, asked for": "{{ '%*d' % (10**9, 1) }}",
    "a wide format method": "{{ '{:>1000000000}'.format(1) }}", "a nested width": "{{ '{:{}}'.format(1, 10**9) }}",
    "a wide format filter": "{{ '%1000000000d'|format(1) }}", "center": "{{ 'x'|center(10**10) }}",
    "a method that centers": "{{ 'x'.center(10**10) }}", "ljust": "{{ 'x'.ljust(10**10) }}",
    "zfill": "{{ 'x'.zfill(10**10) }}", "tabs": "{{ '\t'.expandtabs(10**10) }}",
    "indent": "{{ 'x'|indent(10**10, true) }}",
    "indent by a text": "{{ ('\n' * 60000)|indent('x' * 60000) }}",
    "JSON indented": "{{ messages|tojson(indent=10**9) }}",
    "a power": "{{ 10 ** (10 ** 9) }}", "a product": DOUBLING.replace("'ab'", "7").replace("BODY", "ns.x * ns.x"),
    "many slices": "{{ [1]|slice(10**9)|list }}", "a batch": "{{ [1]|batch(10**9, 'x')|list }}",
    "a round number": "{{ 1|round(10**9) }}", "bytes": "{{ (5).to_bytes(10**10, 'big') }}",
    "lipsum": "{{ lipsum(n=10**9) }}",
    "words": "{{ ('a ' * 60000)|wordwrap(1, true, 'x' * 60000) }}", "all numbers": "{{ range(10**9)|list }}",
}  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_would_not_end_is_refused_soon_and_in_little_room(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_bounds, "MOST_SECONDS", 2.0)
    begun = time.monotonic()
    with pytest.raises(ChatRefused) as caught:
        rendered(ENDLESS[name])
    assert not isinstance(caught.value.__cause__, MemoryError), "it was only the limit of memory that ended it"
    assert time.monotonic() - begun < 30


def test_what_takes_few_but_long_steps_ends_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_bounds, "MOST_SECONDS", 0.2)
    slow = "{% set big = 'x' * 60000000 %}{% for i in range(60000) %}{{ big.count('xy') }}{% endfor %}"
    with pytest.raises(ChatRefused, match=r"more than 0\.2 seconds"):
        rendered(slow)


def test_every_rendering_counts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_bounds, "MOST_STEPS", 50)
    template = ChatTemplate({"default": "{% for i in range(20) %}{{ i }}{% endfor %}"})
    for _ in range(5):
        assert template.render(MESSAGES, None, None, True, {}).endswith("19")


USUAL = {
    "{{ 'a' ~ 1 ~ none ~ missing }}{{ 'b' + 'c' }}": "a1Nonebc",
    "{{ 2 ** 10 }} {{ 7 * 6 }} {{ 'ab' * 3 }}": "1024 42 ababab",
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{% endfor %}": "1/1True",
    "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% else %}none{% endfor %}": "a1",
    "{% for x in [] %}{% else %}none{% endfor %}": "none", "{{ messages[1:]|length }}{{ 'abc'[::-1] }}": "0cba",
    "{% for x in [1, 2, 3] if x > 1 %}{{ x }}{{ loop.revindex }}{% endfor %}": "2231",
    "{% for x in [[1], [2]] recursive %}{{ x if x is number else loop(x) }}{% endfor %}": "12",
    "{{ '%s and %05.1f' % ('a', 2.5) }}{{ '{:>4}'.format('b') }}": "a and 002.5   b",
    "{{ messages|map(attribute='role')|join(', ') }}": "user",
    "{{ {'a': [1]}|tojson(indent=2) }}": '{\n  "a": [\n    1\n  ]\n}',
    "{{ ['b', 'a']|sort|first }}{{ 'x y'|replace(' ', '_')|upper }}": "aX_Y",
    "{{ missing }}{{ missing|default(9) }}": "9",
    "{% set x %}{{ 'a' }}b{% endset %}{{ x|trim }}{{ 'a\nb'|indent(2) }}": "aba\n  b",
    "{{ strftime_now('%Y') }}{{ 1700000000|string }}{{ range(3)|list }}": "20261700000000[0, 1, 2]",
    "{% macro f(n) %}[{{ n }}]{% endmacro %}{{ f(1700000000) }}": "[1700000000]",
}  # fmt: skip


@pytest.mark.parametrize("text", USUAL)
def test_the_bounds_change_nothing_of_what_templates_do(text: str) -> None:
    assert rendered(text) == USUAL[text]


def test_a_chat_of_ten_thousand_long_messages_is_rendered() -> None:
    template = ChatTemplate({"default": "{% for m in messages %}{{ '<' ~ m.role ~ '>' + m.content|trim }}{% endfor %}"})
    many = [{"role": "user", "content": "word " * 500}] * 10_000
    assert len(template.render(many, None, None, True, {})) == 10_000 * (2500 - 1 + 6)


ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ ''|attr('__class__') }}", "{{ messages.__class__ }}",
    "{{ cycler.__init__.__globals__.os }}", "{{ joiner.__init__.__globals__ }}", "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}", "{{ strftime_now.__self__ }}", "{{ self._TemplateReference__context }}",
    "{{ '{0.__class__}'.format(messages) }}", "{{ '{0.__class__.__init__}'.format_map({'0': messages}) }}",
    "{{ ('{0.__cla' ~ 'ss__}').format(1) }}", "{{ ['{0.__class__}']|map('format', 1)|list ~ ''.__class__ }}",
    "{{ (1).__class__.__base__ }}", "{{ [].__reduce__() }}", "{{ messages.append(1) }}",
    "{{ messages[0].update(a=1) }}",
    "{% for f in [raise_exception] %}{{ f.func_globals }}{{ f.__code__ }}{% endfor %}", "{{ messages.clear() }}",
    "{% set ns = namespace() %}{{ ns.__init__.__globals__ }}",
    "{{ (messages|map(attribute='__class__')|list)[0].mro() }}",
    "{{ dict.__base__.__subclasses__() }}", "{{ ''.format.__self__.__class__ }}", "{{ loop_.gi_frame }}",
    "{% include '/etc/passwd' %}", "{% import 'os' as os %}", "{% extends '/etc/passwd' %}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}", "{{ messages|attr('append')|attr('__self__') }}",
)  # fmt: skip


@pytest.mark.parametrize("text", ESCAPES, ids=range(len(ESCAPES)))
def test_a_template_reaches_nothing_but_what_it_is_given(text: str) -> None:
    before = [dict(message) for message in MESSAGES]
    try:
        found = rendered(text)
    except ChatRefused:
        found = ""
    assert found.strip() in ("", "[]")
    assert before == MESSAGES


UNCOMPILED = (
    "{% if %}", "{{ 'a' | nofilter }}", "{" * 50, "{% for %}", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{% if 1 %}" * 3000 + "{% endif %}" * 3000, "{% for a in b %}" * 30 + "{% endfor %}" * 30,
)  # fmt: skip


@pytest.mark.parametrize("text", UNCOMPILED, ids=range(len(UNCOMPILED)))
def test_a_template_that_cannot_be_compiled_is_refused_at_the_start_or_by_its_rows(text: str) -> None:
    try:
        rendered(text)
    except InputError as error:
        assert "--chat-template" in str(error)
    except ChatRefused:
        pass
