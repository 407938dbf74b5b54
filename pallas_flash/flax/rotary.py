"""Rotary position embedding (RoFormer: Su et al., 2021, section 3.2.2), and its ways beyond the
lengths that a model was trained on.

Head dims i and i + H/2 make a pair, as in Llama and Qwen3, which a position p turns by the angle
p * frequency[i]. A scaling changes the frequencies, and may stretch the heads.
"""

import math
from dataclasses import dataclass, fields
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash.validate import arguments


class RotaryScaling(Protocol):
    """How a model's frequencies differ from those of its base; frozen and hashable."""

    def scaled(self, frequencies: np.ndarray, base: float) -> tuple[np.ndarray, float]:
        """Frequencies [H/2] in radians a position, and the factor that stretches the heads."""
        ...


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (Chen et al., 2023): all frequencies divided by `factor`."""

    factor: float

    def __post_init__(self) -> None:
        _require_positive(self)

    def scaled(self, frequencies: np.ndarray, base: float) -> tuple[np.ndarray, float]:
        return frequencies / self.factor, 1.0


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: long waves are divided by `factor`, short ones kept, those between blended.

    Attributes:
      factor: divides frequencies whose wave is longer than original_length / low_frequency_factor.
      low_frequency_factor: see there.
      high_frequency_factor: waves shorter than original_length / high_frequency_factor stay; above
        `low_frequency_factor`.
      original_length: in positions, what the model was trained on at first.
    """

    factor: float = 8.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int = 8192

    def __post_init__(self) -> None:
        _require_positive(self)
        if not self.high_frequency_factor > self.low_frequency_factor:
            expected = f"more than low_frequency_factor = {self.low_frequency_factor}"
            arguments.fail("high_frequency_factor", expected, self.high_frequency_factor)

    def scaled(self, frequencies: np.ndarray, base: float) -> tuple[np.ndarray, float]:
        waves = self.original_length * frequencies / (2 * math.pi)
        low, high = self.low_frequency_factor, self.high_frequency_factor
        kept = np.clip((waves - low) / (high - low), 0.0, 1.0)
        return frequencies * (kept + (1 - kept) / self.factor), 1.0


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al., 2023, sections 3.2 and 3.4), as Qwen3 uses it beyond 32768 positions.

    Attributes:
      factor: divides the frequencies of pairs that turn less than `slow_turns` times.
      original_length: in positions, what the model was trained on.
      fast_turns: pairs that turn more often than this within it stay; between both, a blend.
      slow_turns: see there; below `fast_turns`.
      attention_factor: stretches queries and keys; None for the paper's 0.1 * ln(factor) + 1.
    """

    factor: float
    original_length: int
    fast_turns: float = 32.0
    slow_turns: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        _require_positive(self)
        if not self.fast_turns > self.slow_turns:
            expected = f"more than slow_turns = {self.slow_turns}"
            arguments.fail("fast_turns", expected, self.fast_turns)

    def scaled(self, frequencies: np.ndarray, base: float) -> tuple[np.ndarray, float]:
        pairs = len(frequencies)

        def pair_that_turns(times: float) -> float:
            return pairs * math.log(self.original_length / (2 * math.pi * times), base)

        # Whole pairs, as the models that use it were trained.
        first = max(math.floor(pair_that_turns(self.fast_turns)), 0)
        last = min(math.ceil(pair_that_turns(self.slow_turns)), 2 * pairs - 1)
        kept = 1 - np.clip((np.arange(pairs) - first) / max(last - first, 1e-3), 0.0, 1.0)
        factor = self.attention_factor
        if factor is None:
            factor = 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0
        return frequencies * (kept + (1 - kept) / self.factor), factor


@dataclass(frozen=True)
class RotaryEmbedding:
    """Turns heads by their positions.

    Attributes:
      base: frequency i is base^(-2i / H). Above 1.
      scaling: a `LinearScaling`, `Llama3Scaling`, `YarnScaling` or one like them; None for none.
    """

    base: float = 10000.0
    scaling: RotaryScaling | None = None

    def __post_init__(self) -> None:
        _require_positive(self, "base")
        if not self.base > 1:
            arguments.fail("base", "a number above 1", self.base)
        # A class, not yet one of its values, has the method too.
        is_scaling = callable(getattr(self.scaling, "scaled", None))
        is_scaling &= not isinstance(self.scaling, type)
        if self.scaling is not None and not is_scaling:
            arguments.fail("scaling", "None or a RotaryScaling", f"{self.scaling!r:.80}")

    def __call__(self, heads: jax.Array, positions: jax.Array) -> jax.Array:
        """Heads, turned. In float32, whatever the dtype of `heads`.

        Args:
          heads: [*batch, T, N, H], H even.
          positions: integers [*batch, T].

        Returns:
          The same shape and dtype.
        """
        frequencies, factor = self.frequencies(heads.shape[-1])
        angles = jnp.multiply.outer(positions.astype(jnp.float32), frequencies)[..., None, :]
        cos, sin = factor * jnp.cos(angles), factor * jnp.sin(angles)
        first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
        turned = [first * cos - second * sin, second * cos + first * sin]
        return jnp.concatenate(turned, axis=-1).astype(heads.dtype)

    def frequencies(self, head_dim: int) -> tuple[np.ndarray, float]:
        """float32 [H/2] in radians a position, and the factor that stretches the heads."""
        if head_dim < 2 or head_dim % 2:
            arguments.fail("head_dim", "an even int, for pairs that turn", head_dim)
        frequencies = float(self.base) ** (-2.0 * np.arange(head_dim // 2) / head_dim)
        factor = 1.0
        if self.scaling is not None:
            frequencies, factor = self.scaling.scaled(frequencies, float(self.base))
        return frequencies.astype(np.float32), factor


def _require_positive(settings: object, *names: str) -> None:
    """Finite numbers above zero in every field, or in those named; None where that may stand."""
    # pyrefly: ignore[bad-argument-type]  # Every caller is a dataclass.
    for name in names or [field.name for field in fields(settings)]:
        x = getattr(settings, name)
        if x is None and name == "attention_factor":
            continue
        is_number = isinstance(x, (int, float, np.integer, np.floating)) and not isinstance(x, bool)
        if not (is_number and 0 < x < math.inf):
            arguments.fail(name, "a finite number above 0", f"{x!r:.80}")
