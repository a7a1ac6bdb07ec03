"""Jinja as a bounded sandbox: every operation a template can reach is known, counted, and keeps text's origin.

Stricter than jinja2's own sandbox: attributes and calls are allow-lists, and everything that can take
time or memory reports to the meter first. Source of the escape classes: CVE-2024-34359, CVE-2024-56326.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2.environment import Template
from jinja2.exceptions import SecurityError
from jinja2.lexer import TokenStream
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.utils import pass_context

from localllm.models.template import filters, strings
from localllm.models.template.compiler import CountingGenerator, Statements, bounded_tokens
from localllm.models.template.environment import MeteredEnvironment
from localllm.models.template.meter import MAX_INT_BITS, Limits, Meter, OverBudget
from localllm.models.template.names import TESTS, functions
from localllm.models.template.text import concat, cost

_CONTAINER_METHODS = frozenset({"get", "keys", "values", "items", "copy", "index", "count"})
_LOOP_METHODS = frozenset({"cycle", "changed"})
_DICT_ATTRIBUTES = frozenset(dir(dict))


class TextMethod:
    """A string's method as a template holds it, before it is called."""

    __slots__ = ("_env", "_name", "_text")

    def __init__(self, env: Sandbox, text: str, name: str) -> None:
        self._env, self._text, self._name = env, text, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._name == "format":
            return self._env.format_text(self._text, args, kwargs)
        if self._name == "format_map":
            return self._env.format_text(self._text, (), args[0])
        if self._name == "join":
            args = (filters.listed(self._env, args[0]), *args[1:])
        return strings.METHODS[self._name](self._env.meter, self._text, *args, **kwargs)


class Sandbox(MeteredEnvironment):
    """The environment of one chat template."""

    code_generator_class = CountingGenerator
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

    def __init__(self, limits: Limits, days_back: int = 0) -> None:
        super().__init__(
            limits,
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[Statements],
            finalize=self._finalize,
        )
        self.filters = dict(filters.FILTERS)
        self.tests = dict(TESTS)
        self.globals: Any = functions(self, days_back)
        self._functions = frozenset(map(id, self.globals.values()))

    def render(self, template: Template, variables: Mapping[str, Any], max_chars: int) -> str:
        """Return what the template writes. Raises: OverBudget, RaisedByTemplate, and whatever Jinja raises."""
        pieces: list[str] = []
        n_chars = 0
        for piece in template.root_render_func(template.new_context(dict(variables))):
            pieces.append(piece)
            n_chars += len(piece)
            if n_chars > max_chars:
                raise OverBudget(f"it writes more than {max_chars} characters")
            self.meter.charge(len(piece))
        return concat(pieces)

    # What the generated code calls

    def concat(self, pieces: Any) -> str:
        """Join what a macro or block wrote."""
        parts = tuple(pieces)
        self.meter.tick(len(parts))
        return strings.add(self.meter, parts)

    def joined(self, values: tuple[Any, ...]) -> str:
        """Evaluate `a ~ b ~ c`."""
        return strings.add(self.meter, tuple(self.present(value) for value in values))

    def counted(self, values: Any) -> Any:
        """Return what a loop runs over, counting each turn."""
        if isinstance(values, Undefined):
            return values
        return _CountedList(self.meter, filters.listed(self, values))

    def weighed(self, value: Any) -> Any:
        """Return a value about to be compared or hashed."""
        self.meter.tick()
        if not isinstance(value, (bool, int, float)) and value is not None:
            self.meter.weigh(value)
        return value

    def searched(self, value: Any) -> Any:
        """Return the right side of `in`."""
        self.meter.tick()
        if not isinstance(value, dict):
            self.meter.weigh(value)
        return value

    def sliced(self, value: Any) -> Any:
        """Return a value about to be sliced."""
        self.meter.charge(cost(value) if isinstance(value, str) else 8 * len(value) if isinstance(value, list) else 8)
        return value

    def made(self, value: Any) -> Any:
        """Return a new list, tuple or dict."""
        self.meter.charge(64 + 8 * len(value))
        return value

    @pass_context
    def _finalize(self, context: Context, value: Any) -> str:
        return self.present(value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Evaluate an operator of two values within bounds."""
        meter = self.meter
        meter.tick()
        if isinstance(left, str) or isinstance(right, str):
            if operator == "+" and isinstance(left, str) and isinstance(right, str):
                return strings.add(meter, (left, right))
            if operator == "%" and isinstance(left, str):
                return strings.percent(meter, left, right)
            if operator == "*" and isinstance(left, (str, int)) and isinstance(right, (str, int)):
                text, n_times = (left, right) if isinstance(left, str) else (right, left)
                if isinstance(text, str) and isinstance(n_times, int):
                    return strings.repeat(meter, text, n_times)
            return self.binop_table[operator](left, right)
        if isinstance(left, (list, tuple)) or isinstance(right, (list, tuple)):
            return self._on_lists(operator, left, right)
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_INT_BITS and abs(left) > 1:
                raise OverBudget(f"it computes with integers of more than {MAX_INT_BITS} bits")
        return meter.integer(self.binop_table[operator](left, right))

    def _on_lists(self, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(right, (list, tuple)) and isinstance(left, (list, tuple)):
            self.meter.charge(8 * (len(left) + len(right)))
        elif operator == "*":
            items, n_times = (left, right) if isinstance(left, (list, tuple)) else (right, left)
            self.meter.charge(8 * len(items) * max(0, n_times))
        return self.binop_table[operator](left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Look up `obj.attribute`."""
        self.meter.tick()
        if isinstance(obj, dict):
            self.message = self.places.get(id(obj), self.message)
            if attribute not in _DICT_ATTRIBUTES:
                return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        elif isinstance(obj, str):
            return self._text_attribute(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Look up `obj[argument]`."""
        self.meter.tick()
        if not isinstance(argument, (str, int)):
            self.meter.weigh(argument)
        if isinstance(obj, dict):
            self.message = self.places.get(id(obj), self.message)
        elif isinstance(obj, str) and isinstance(argument, str):
            return self._text_attribute(obj, argument)
        return super().getitem(obj, argument)

    def _text_attribute(self, text: str, name: str) -> Any:
        if name in strings.METHODS or name in ("format", "format_map"):
            return TextMethod(self, text, name)
        if name in dir(str):
            raise SecurityError(f"{name!r} of a string is not available to a template")
        return self.undefined(obj=text, name=name)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allow data, and the methods that `call` allows."""
        if isinstance(value, (BuiltinMethodType, MethodType)):
            return self.is_safe_callable(value)
        return super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        """Refuse private attributes at once; a forbidden method only when it is used."""
        if attribute.startswith("_"):
            raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} object is unsafe.")
        return super().unsafe_undefined(obj, attribute)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Strings hand out `TextMethod`s: no method of a Python string is ever in a template's hands."""
        return None

    def format_text(self, template: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Python's str.format, whose field names are looked up in the sandbox."""
        return strings.format_text(self.meter, template, self._field, args, kwargs)

    def _field(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        first, rest = strings.split_field(name)
        value = args[first] if isinstance(first, int) else kwargs[first]
        for is_attribute, key in rest:
            value = self.getattr(value, str(key)) if is_attribute else self.getitem(value, key)
        return value

    def is_safe_callable(self, obj: Any) -> bool:
        """Allow macros, loops, blocks, our functions and the reading methods of data; nothing else."""
        if isinstance(obj, (TextMethod, Macro, LoopContext, BlockReference, Undefined)) or id(obj) in self._functions:
            return True
        if isinstance(obj, BuiltinMethodType):
            return type(obj.__self__) in (dict, list, tuple) and obj.__name__ in _CONTAINER_METHODS
        return isinstance(obj, MethodType) and type(obj.__self__) is LoopContext and obj.__name__ in _LOOP_METHODS

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (jinja2's)
        """Call what may be called, nested to a bounded depth."""
        if not __self.is_safe_callable(__obj):
            raise SecurityError(f"a template cannot call a {type(__obj).__name__}")
        if isinstance(__obj, (BuiltinMethodType, MethodType)):
            __self.meter.weigh(args)
            if __obj.__name__ in ("index", "count", "copy"):
                __self.meter.weigh(__obj.__self__)
        elif isinstance(__obj, LoopContext):
            args = (__self.counted(args[0]),)
        __self.meter.enter()
        try:
            return __context.call(__obj, *args, **kwargs)
        finally:
            __self.meter.leave()

    def _tokenize(
        self, source: str, name: str | None, filename: str | None = None, state: str | None = None
    ) -> TokenStream:
        raw = self.lexer.tokeniter(source, name, filename, state)
        return TokenStream(bounded_tokens(self.lexer.wrap(raw, name, filename)), name, filename)


class _CountedList(list[Any]):
    """A list that counts each of its turns."""

    __slots__ = ("_meter",)

    def __init__(self, meter: Meter, items: list[Any]) -> None:
        super().__init__(items)
        self._meter = meter

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            self._meter.tick()
            yield item
