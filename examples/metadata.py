"""The settings that come with a model's weights, each read as what it should be."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from weights import WeightsError

T = TypeVar("T")

# What an error calls the types.
KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


@dataclass(frozen=True)
class Metadata:
    """Named values; None stands for one that is not there.

    All methods raise `WeightsError`, which names the value, where it is from, and what it is.

    Attributes:
      source: what errors call the place that the values are from.
      values: by name.
    """

    source: str
    values: Mapping[str, Any]

    def optional(self, name: str, kind: type[T]) -> T | None:
        """A value of one of the `KINDS`, or None."""
        x = self.values.get(name)
        if x is None:
            return None
        # Files write whole numbers without a point.
        if kind is float and type(x) is int:
            x = float(x)
        is_finite = not isinstance(x, float) or math.isfinite(x)
        # Not `isinstance`, for which True is an int.
        if type(x) is not kind or not is_finite:
            raise self.unexpected(name, KINDS[kind])
        return x

    def get(self, name: str, kind: type[T], default: T | None = None) -> T:
        """Likewise; one that is not there is an error if there is no default."""
        x = self.optional(name, kind)
        if x is not None:
            return x
        if default is None:
            raise WeightsError(f"{self.source} has no field {name!r}")
        return default

    def one_of(self, name: str, choices: tuple[T, ...], default: T | None = None) -> T:
        """One of a few values, and likewise."""
        x = self.values.get(name)
        x = default if x is None else x
        if x is None:
            raise WeightsError(f"{self.source} has no field {name!r}")
        if x not in choices:
            raise self.unexpected(name, " or ".join(map(repr, choices)))
        return x

    def refuse(self, *names: str) -> None:
        """Values that would matter, and that nothing here can heed."""
        for name in names:
            if self.values.get(name) is not None:
                raise WeightsError(
                    f"{self.source} has {name} = {self.values[name]!r:.80}, which is not supported"
                )

    def refuse_others(self, known: Collection[str]) -> None:
        """All but those that are known."""
        self.refuse(*sorted(self.values.keys() - set(known)))

    def unexpected(self, name: str, expected: str) -> WeightsError:
        """The error about a value."""
        got = f"{self.values.get(name)!r:.80}"
        return WeightsError(f"{self.source} has {name} = {got}, expected {expected}")
