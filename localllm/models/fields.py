"""Typed access to a header's metadata, by the names of its architecture."""

from __future__ import annotations

from localllm.models.gguf import GgufArray, GgufHeader, refusal, shown


class Fields:
    """The metadata of one header. Names without `general.` or `tokenizer.` are the architecture's."""

    def __init__(self, header: GgufHeader) -> None:
        self.metadata = header.metadata
        self.architecture = header.architecture
        self.file = header.path.name

    @property
    def n_layers(self) -> int:
        """Layers that run: blocks without those of multi-token prediction."""
        return max(0, self.integer("block_count", 0) - self.integer("nextn_predict_layers", 0))

    def text(self, key: str) -> str | None:
        """Return a non-empty string of the whole key, or None."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) and value else None

    def number(self, key: str) -> float | int | None:
        """Return a number of the whole key, or None."""
        value = self.metadata.get(key)
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def integer(self, name: str, default: int) -> int:
        """Return one integer of the architecture; of an array, its largest element."""
        values = self.integers(name)
        return max(values) if values else default

    def integers(self, name: str) -> list[int]:
        """Return an integer or an array of integers (or bools) of the architecture as a list; [] if absent."""
        value = self.metadata.get(f"{self.architecture}.{name}")
        if isinstance(value, GgufArray):
            elements = value.to_list() if value.type_name not in ("string", "f32", "f64") else []
            return [int(element) for element in elements]
        return [int(value)] if isinstance(value, int) else []

    def flag(self, name: str, default: bool) -> bool:
        """Return a bool of the architecture."""
        value = self.metadata.get(f"{self.architecture}.{name}")
        return value if isinstance(value, bool) else default

    def per_layer(self, name: str, default: int | None) -> list[int]:
        """Return one integer a layer; [] if the field is absent and there is no default.

        Raises: ModelRefused for an array that is shorter than the layers, or negative values.
        """
        values = self.integers(name)
        if not values:
            return [] if default is None else [default] * self.n_layers
        key = shown(f"{self.architecture}.{name}")
        if min(values) < 0:
            raise refusal(self.file, key, f"holds {min(values)}")
        if len(values) == 1:
            return values * self.n_layers
        if len(values) < self.n_layers:
            raise refusal(self.file, key, f"has {len(values)} elements for {self.n_layers} layers")
        return values[: self.n_layers]

    def require(self, name: str) -> int:
        """Return a positive integer of the architecture. Raises ModelRefused if there is none."""
        key = shown(f"{self.architecture}.{name}")
        values = self.integers(name)
        if not values:
            raise refusal(self.file, key, "is missing")
        if max(values) <= 0:
            raise refusal(self.file, key, f"is {max(values)}")
        return max(values)
