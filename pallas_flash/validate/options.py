"""The static arguments: each as it comes, and out comes what `AttentionSpec` holds."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from pallas_flash.spec import Precision
from pallas_flash.validate import arguments

# Algorithms for float32 operands, and float32 sums, that some device has.
_ALGORITHMS = tuple(
    jax.lax.DotAlgorithmPreset[name]
    for name in (
        "DEFAULT",
        "F32_F32_F32",
        "TF32_TF32_F32",
        "TF32_TF32_F32_X3",
        "BF16_BF16_F32",
        "BF16_BF16_F32_X3",
        "BF16_BF16_F32_X6",
        "BF16_BF16_F32_X9",
    )
)

_LARGEST = float(jnp.finfo(jnp.float32).max)
_LARGEST_RATIO = 1e38


def scale(x: ArrayLike | None, head_dim: int) -> tuple[float, jax.Array | None]:
    """The scale as a static number, or as an array that takes its place; None is 1 / sqrt(H)."""
    if x is None:
        return 1 / math.sqrt(head_dim), None
    expected = "a real number, or a real array of shape []"
    try:
        # NumPy takes an int beyond 64 bits for an object.
        number = x if isinstance(x, jax.Array) else np.asarray(float(x) if type(x) is int else x)
    except (TypeError, ValueError, OverflowError):
        arguments.fail("scale", expected, f"{x!r:.80}")
    kinds = (jnp.floating, jnp.integer)
    if number.shape != () or not any(jnp.issubdtype(number.dtype, kind) for kind in kinds):
        got = arguments.describe(number) if isinstance(number, jax.Array) else f"{x!r:.80}"
        arguments.fail("scale", expected, got)
    # An array of JAX stays one, for it may be a tracer or differentiated.
    if isinstance(number, jax.Array):
        return 1.0, number.astype(jnp.float32)
    if not abs(float(number)) <= _LARGEST:
        arguments.fail("scale", "a finite number, as float32", f"{x!r:.80}")
    return float(number), None


def is_causal(x: object) -> bool:
    """A static bool."""
    if not isinstance(x, (bool, np.bool_)):
        arguments.fail("is_causal", "a bool", f"{type(x).__name__}: {x!r:.80}")
    return bool(x)


def local_window_size(x: object) -> tuple[int | None, int | None] | None:
    """(left, right), None for a side without limit; one int stands for both. None: no window."""
    if x is None:
        return None
    sides = x if isinstance(x, (tuple, list)) else (x, x)
    reach = [
        int(side)
        for side in sides
        if isinstance(side, (int, np.integer)) and not isinstance(side, bool) and side >= 0
    ]
    if len(sides) != 2 or len(reach) != 2:
        arguments.fail("local_window_size", "an int >= 0 or a pair (left, right) of such", repr(x))
    left, right = (side if side < 2 * arguments.FARTHEST else None for side in reach)
    return left, right


def logits_soft_cap(x: object, scale: float) -> float | None:
    """A static number above zero, for logits of that static scale."""
    if x is None:
        return None
    is_number = isinstance(x, (int, float, np.integer, np.floating)) and not isinstance(x, bool)
    # Not every int has a float, but all can be compared with one. Nearer to the ends of float32,
    # logits / cap would leave it.
    if not (is_number and 1e-20 <= (x if isinstance(x, int) else float(x)) <= 1e20):
        expected = "a finite number > 0, from 1e-20 to 1e20, or None"
        arguments.fail("logits_soft_cap", expected, repr(x))
    # A compiler may make one factor of the two.
    if abs(scale) / float(x) > _LARGEST_RATIO:
        arguments.fail(
            "logits_soft_cap",
            f"at least |scale| / {_LARGEST_RATIO:g}, where scale = {scale:g}",
            repr(x),
        )
    return float(x)


def precision(x: object) -> Precision:
    """What products of float32 operands follow; None is `jax_default_matmul_precision`."""
    # pyrefly: ignore[missing-attribute]  # JAX makes its options attributes at run time.
    given = jax.config.jax_default_matmul_precision if x is None else x
    if given is None:
        return jax.lax.Precision.DEFAULT
    if isinstance(given, str):
        given = jax.lax.DotAlgorithmPreset.__members__.get(given, given)
    if isinstance(given, str):
        try:
            return jax.lax.Precision(given)
        except ValueError:
            pass
    if isinstance(given, jax.lax.Precision):
        return given
    if isinstance(given, jax.lax.DotAlgorithmPreset) and given in _ALGORITHMS:
        return given
    arguments.fail(
        "jax_default_matmul_precision, as precision is None" if x is None else "precision",
        "None, 'default', 'high', 'highest', a jax.lax.Precision, or one of "
        f"{', '.join(str(algorithm) for algorithm in _ALGORITHMS)}",
        repr(given),
    )
