"""The part of the sandbox that filters, tests and functions use: its meter, and what a value is as text."""

from __future__ import annotations

from collections.abc import ItemsView, KeysView, Mapping, ValuesView
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.runtime import Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from localllm.models.template.meter import Limits, Meter
from localllm.models.template.text import whole

_DATA = (str, int, float, range, type(None), Undefined, KeysView, ValuesView, ItemsView)


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """A Jinja environment with an account. One thread at a time; `meter` is the present rendering's."""

    def __init__(self, limits: Limits, **options: Any) -> None:
        super().__init__(**options)
        self.limits = limits
        self.meter = Meter(limits)
        self.places: Mapping[int, int] = {}  # id of a message -> its index
        self.message: int | None = None  # the message that the template looked at last

    def begin(self, places: Mapping[int, int], n_input_chars: int) -> None:
        """Start the account of a new rendering."""
        self.meter = Meter(self.limits, n_input_chars)
        self.places, self.message = places, None

    def present(self, value: Any) -> str:
        """Return a value as text. Raises: SecurityError for what is no data."""
        if isinstance(value, str):
            self.meter.tick()
            return value
        if value is None or isinstance(value, (bool, int, float, Undefined)):
            self.meter.tick()
            return str(value)
        self.meter.charge(2 * self.meter.weigh(value))
        self.check_data(value)
        return whole(str(value), value)

    def check_data(self, value: Any) -> None:
        """Refuse anything but data (already weighed): what other objects hold is neither bounded nor printable."""
        waiting = [value]
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict):
                waiting.extend(value.values())
            elif isinstance(value, (list, tuple)):
                waiting.extend(value)
            elif not isinstance(value, _DATA):
                raise SecurityError(f"a template cannot write a {type(value).__name__}")
