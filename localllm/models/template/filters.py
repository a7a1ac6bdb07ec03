"""The filters that a chat template has: Jinja's, counted before they cost anything.

Lists are made at once (no generator lives in a template), what prints or formats keeps origins, and
what has no place in a prompt (urlize, xmlattr, lipsum, random, ...) is not there at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any

from jinja2 import filters as stock
from jinja2.runtime import Context, Undefined
from jinja2.utils import pass_context, pass_environment
from markupsafe import escape

from localllm.models.template import strings
from localllm.models.template.environment import MeteredEnvironment
from localllm.models.template.meter import Meter, OverBudget
from localllm.models.template.text import concat, whole

_MAX_PART = 64  # characters of an indent or separator
_MAX_PRECISION = 100


def listed(env: MeteredEnvironment, value: Any) -> list[Any]:
    """Return any iterable of a template as a list."""
    if isinstance(value, str):
        env.meter.charge(strings.PART_CHARS * len(value))
    elif isinstance(value, (list, tuple, range, dict, KeysView, ValuesView, ItemsView)):
        env.meter.charge(8 * len(value))
    else:
        return list(_counted_items(env, value))
    env.meter.tick(len(value))
    return list(value)


def _counted_items(env: MeteredEnvironment, value: Any) -> Any:
    for item in value:
        env.meter.charge(8)
        yield item


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Count a filter or test whose cost does not depend on its arguments."""

    @pass_environment
    def call(env: MeteredEnvironment, *args: Any, **kwargs: Any) -> Any:
        env.meter.tick()
        return function(*args, **kwargs)

    return call


def _on_text(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turn a bounded string operation into a filter on whatever prints."""

    @pass_environment
    def filtered(env: MeteredEnvironment, value: Any, *args: Any, **kwargs: Any) -> Any:
        return function(env.meter, env.present(value), *args, **kwargs)

    return filtered


def _on_list(function: Callable[..., Any], *, with_context: bool = False) -> Callable[..., Any]:
    """Count a stock filter over a list (weighed as often as sorting it reads it), and list its result.

    `with_context`: it calls filters and tests by name, which count themselves.
    """

    @pass_context
    def filtered(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        env: Any = context.environment
        items = listed(env, value) if not isinstance(value, Undefined) else []
        for _ in range(max(1, len(items).bit_length())):
            env.meter.weigh(items)
        if not with_context:  # these compare or hash what an attribute leads to
            env.check_data(items)
        result = function(context if with_context else env, items, *args, **kwargs)
        return list(result) if isinstance(result, Iterator) else result

    return filtered


def _on_whole(function: Callable[..., Any], growth: int) -> Callable[..., Any]:
    """Count a stock text filter that moves characters about; its result is the caller's if its input was."""

    @pass_environment
    def filtered(env: MeteredEnvironment, value: Any, *args: Any, **kwargs: Any) -> str:
        text = env.present(value)
        env.meter.charge(growth * len(text) + env.meter.weigh((args, *kwargs.values())))
        return whole(str(function(env, text, *args, **kwargs)), text, args, kwargs)

    return filtered


@pass_environment
def _tojson(
    env: MeteredEnvironment,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    for part in (indent, *(separators or ())):
        width = part if isinstance(part, int) else len(part or "")
        if width > _MAX_PART:
            raise OverBudget(f"it indents by more than {_MAX_PART} characters")
    n_chars = env.meter.weigh(value)
    env.meter.charge(6 * n_chars)
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    env.meter.charge(len(text))
    return whole(text, value)


@pass_environment
def _join(env: MeteredEnvironment, value: Any, d: Any = "", attribute: Any = None) -> str:
    items = [] if isinstance(value, Undefined) else listed(env, value)
    if attribute is not None:
        items = list(map(stock.make_attrgetter(env, attribute), items))
    return strings.join(env.meter, env.present(d), [env.present(item) for item in items])


@pass_environment
def _replace(env: MeteredEnvironment, value: Any, old: Any, new: Any, count: int | None = None) -> str:
    n_most = -1 if count is None else count
    return strings.replace(env.meter, env.present(value), env.present(old), env.present(new), n_most)


@pass_environment
def _indent(env: MeteredEnvironment, value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = env.present(value)
    step = width if isinstance(width, str) else strings.repeat(env.meter, " ", width)
    lines = strings.splitlines(env.meter, concat((text, "\n")))
    env.meter.charge(len(text) + len(step) * len(lines))
    indented = [concat((step, line)) if at and (line or blank) else line for at, line in enumerate(lines)]
    return concat((step if first else "", strings.join(env.meter, "\n", indented)))


@pass_environment
def _format(env: MeteredEnvironment, value: Any, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise TypeError("can't handle positional and keyword arguments at the same time")
    return strings.percent(env.meter, env.present(value), kwargs or args)


@pass_environment
def _int(env: MeteredEnvironment, value: Any, default: int = 0, base: int = 10) -> Any:
    env.meter.weigh(value)
    return env.meter.integer(stock.do_int(value, default, base))


@pass_environment
def _round(env: MeteredEnvironment, value: float, precision: int = 0, method: Any = "common") -> float:
    env.meter.tick()
    if abs(precision) > _MAX_PRECISION:
        raise OverBudget(f"it rounds to more than {_MAX_PRECISION} digits")
    return stock.do_round(value, precision, method)


@pass_environment
def _sum(env: MeteredEnvironment, value: Any, attribute: Any = None, start: float = 0) -> Any:
    if not isinstance(start, (int, float)):
        raise TypeError("sum adds numbers")
    items = listed(env, value)
    if attribute is not None:
        items = list(map(stock.make_attrgetter(env, attribute), items))
    return env.meter.integer(sum(items, start))


@pass_environment
def _items(env: MeteredEnvironment, value: Any) -> list[Any]:
    return listed(env, stock.do_items(value))


@pass_environment
def _batch(env: MeteredEnvironment, value: Any, linecount: int, fill_with: Any = None) -> list[Any]:
    env.meter.charge(8 * linecount)
    return list(stock.do_batch(listed(env, value), linecount, fill_with))


@pass_environment
def _slice(env: MeteredEnvironment, value: Any, slices: int, fill_with: Any = None) -> list[Any]:
    env.meter.tick(slices)
    env.meter.charge(64 * slices)
    return list(stock.sync_do_slice(listed(env, value), slices, fill_with))


@pass_environment
def _reverse(env: MeteredEnvironment, value: Any) -> Any:
    if isinstance(value, str):
        env.meter.charge(len(value))
        return value[::-1]
    return listed(env, value)[::-1]


@pass_environment
def _list(env: MeteredEnvironment, value: Any) -> list[Any]:
    return [] if isinstance(value, Undefined) else listed(env, value)


@pass_environment
def _dictsort(env: MeteredEnvironment, value: Mapping[Any, Any], *args: Any, **kwargs: Any) -> list[Any]:
    for _ in range(max(1, len(value).bit_length())):
        env.meter.weigh(value)
    return stock.do_dictsort(value, *args, **kwargs)


def _wordcount(meter: Meter, text: str) -> int:
    meter.charge(len(text))
    return sum(1 for _ in re.finditer(r"\w+", text))


@pass_environment
def _safe(env: MeteredEnvironment, value: Any) -> str:
    """Return the text: nothing is ever escaped for HTML here."""
    return env.present(value)


FILTERS: Mapping[str, Callable[..., Any]] = {
    **{name: _on_text(strings.METHODS[name]) for name in ("upper", "lower", "capitalize")},
    **dict.fromkeys(("string", "safe"), _safe),
    **{name: counted(len) for name in ("length", "count")},
    **{name: counted(stock.do_default) for name in ("default", "d")},
    **{name: _on_whole(lambda _, text: escape(text), 6) for name in ("escape", "e", "forceescape")},
    **{name: _on_list(getattr(stock, f"sync_do_{name}")) for name in ("unique", "groupby")},
    **{name: _on_list(getattr(stock, f"do_{name}")) for name in ("sort", "min", "max")},
    **{
        name: _on_list(getattr(stock, f"sync_do_{name}"), with_context=True)
        for name in ("map", "select", "reject", "selectattr", "rejectattr")
    },
    "abs": counted(abs),
    "attr": stock.do_attr,
    "batch": _batch,
    "center": _on_text(lambda meter, text, width=80: strings.pad(meter, text, width, how="center")),
    "dictsort": _dictsort,
    "first": stock.sync_do_first,
    "float": counted(stock.do_float),
    "format": _format,
    "indent": _indent,
    "int": _int,
    "items": _items,
    "join": _join,
    "last": stock.do_last,
    "list": _list,
    "replace": _replace,
    "reverse": _reverse,
    "round": _round,
    "slice": _slice,
    "sum": _sum,
    "title": _on_whole(lambda _, text: stock.do_title(text), 8),
    "tojson": _tojson,
    "trim": _on_text(strings.strip),
    "truncate": _on_whole(stock.do_truncate, 2),
    "wordcount": _on_text(_wordcount),
}
