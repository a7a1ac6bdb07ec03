"""The names a template can test by and call, counted and bounded like its filters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, NoReturn

from jinja2 import tests as stock_tests
from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace, pass_environment

from localllm.models.template.environment import MeteredEnvironment
from localllm.models.template.filters import counted
from localllm.models.template.meter import OverBudget
from localllm.models.template.text import NullText, whole

_MAX_FORMAT = 256
_MAX_RANGE = 100_000


class RaisedByTemplate(Exception):
    """`raise_exception` was called: the words are the template's own."""


class TemplateNamespace(Namespace):
    """Jinja's namespace, whose attributes cannot begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"  # error messages print it, and must not walk what it holds


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


def _weighed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Count a test that compares: it may read everything in its arguments."""

    @pass_environment
    def compare(env: MeteredEnvironment, *args: Any) -> Any:
        for value in args:
            env.meter.weigh(value)
        return function(*args)

    return compare


def _is_none(value: Any) -> bool:
    return value is None or isinstance(value, NullText)


_COMPARING = [
    "==",
    "eq",
    "equalto",
    "!=",
    "ne",
    ">",
    "gt",
    "greaterthan",
    "ge",
    ">=",
    "<",
    "lt",
    "lessthan",
    "<=",
    "le",
    "in",
]
_SIMPLE = [
    "odd",
    "even",
    "divisibleby",
    "defined",
    "undefined",
    "boolean",
    "false",
    "true",
    "integer",
    "float",
    "string",
    "mapping",
    "number",
    "sequence",
    "iterable",
    "callable",
    "sameas",
]

_STOCK: Any = stock_tests.TESTS
TESTS: Mapping[str, Callable[..., Any]] = {
    **{name: _weighed(_STOCK[name]) for name in _COMPARING},
    **{name: counted(_STOCK[name]) for name in _SIMPLE},
    "none": counted(_is_none),
    "lower": pass_environment(lambda env, value: env.present(value).islower()),
    "upper": pass_environment(lambda env, value: env.present(value).isupper()),
    "filter": _STOCK["filter"],
    "test": _STOCK["test"],
}


def functions(env: MeteredEnvironment, days_back: int = 0) -> dict[str, Callable[..., Any]]:
    """Return the functions that a template may call by name; to them it is `days_back` days ago."""

    def numbers(*args: int) -> range:
        made = range(*args)
        if len(made) > _MAX_RANGE:
            raise OverBudget(f"it makes a range of more than {_MAX_RANGE} numbers")
        return made

    def mapping(*args: Any, **kwargs: Any) -> dict[Any, Any]:
        env.meter.weigh(args)
        return dict(*args, **kwargs)

    def namespace(*args: Any, **kwargs: Any) -> TemplateNamespace:
        env.meter.weigh(args)
        return TemplateNamespace(*args, **kwargs)

    def raise_exception(message: Any = "") -> NoReturn:
        raise RaisedByTemplate(env.present(message))

    def strftime_now(pattern: str) -> str:
        if len(pattern) > _MAX_FORMAT:
            raise OverBudget(f"it formats a date by more than {_MAX_FORMAT} characters")
        return whole((datetime.now() - timedelta(days=days_back)).strftime(pattern), pattern)

    return {
        "range": numbers,
        "dict": mapping,
        "namespace": namespace,
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
    }
