"""The problems that are timed, by suite and name; how much work each is; and its arrays."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash.testing import Case

Arrays = dict[str, jax.Array]

# Query, key and value; the other arrays; a cotangent of the output.
Arguments = tuple[Arrays, Arrays, jax.Array]

# Products of the forward and the backward over those of the forward: q.k and p.v; then q.k again,
# and one each for dp, dv, dk and dq.
_FORWARD_AND_BACKWARD = 7 / 2

# What the float64 reference can afford.
_LARGEST_JUDGED_LENGTH = 1024


def _problem(B: int, S: int, N: int, K: int, H: int, **options: Any) -> Case:
    return Case(B=B, T=S, S=S, N=N, K=K, H=H, dtype="bfloat16", **options)


_LENGTHS = tuple(np.random.default_rng(0).integers(1, 8192, 16, endpoint=True).tolist())

SUITES = {
    "headline": {
        "full": _problem(2, 8192, 16, 16, 128),
        "causal": _problem(2, 8192, 16, 16, 128, is_causal=True),
        "grouped": _problem(2, 4096, 32, 8, 128, is_causal=True),
        "short": _problem(8, 2048, 16, 16, 128, is_causal=True),
        "h64": _problem(2, 8192, 32, 32, 64, is_causal=True),
        "h256": _problem(2, 8192, 8, 8, 256, is_causal=True),
    },
    "shapes": {
        "s8192-h128": _problem(2, 8192, 16, 16, 128, is_causal=True),
        "s8191-h128": _problem(2, 8191, 16, 16, 128, is_causal=True),
        "s8192-h96": _problem(2, 8192, 16, 16, 96, is_causal=True),
        "s8192-h80": _problem(2, 8192, 16, 16, 80, is_causal=True),
    },
    "masks": {
        "long": _problem(1, 32768, 16, 16, 128, is_causal=True),
        "long-window": _problem(1, 32768, 16, 16, 128, is_causal=True, local_window_size=(1023, 0)),
        "cap-none": _problem(2, 8192, 16, 16, 128, is_causal=True),
        "cap-50": _problem(2, 8192, 16, 16, 128, is_causal=True, logits_soft_cap=50.0),
        "lengths-full": _problem(16, 8192, 16, 16, 128),
        "lengths-uniform": _problem(16, 8192, 16, 16, 128, key_value_seq_lengths=_LENGTHS),
    },
    # For a machine without a GPU: does the script run?
    "smoke": {"smoke": _problem(1, 64, 2, 1, 16, is_causal=True, local_window_size=(31, 0))},
}


def visible_pairs(case: Case) -> int:
    """How many (query, key) pairs are not masked, over the batch, in one head."""
    i = np.arange(case.T)
    left, right = case.local_window_size or (case.T, case.S)
    lengths = np.minimum(case.S, case.key_value_seq_lengths or (case.S,) * case.B)[:, None]
    start = np.maximum(0, i - left)
    stop = np.minimum(lengths, i + (0 if case.is_causal else right) + 1)
    return int(np.maximum(0, stop - start).sum())


def share_of_work(case: Case) -> float:
    """Of the pairs that there are without a mask."""
    return visible_pairs(case) / (case.B * case.T * case.S)


def flops(case: Case, with_gradients: bool) -> float:
    """Two products of a multiplication and an addition for each visible pair and feature.

    Causal: half of what full attention takes, to one part in the length.
    """
    forward = 4 * visible_pairs(case) * case.N * case.H
    return forward * (_FORWARD_AND_BACKWARD if with_gradients else 1)


def options(case: Case) -> dict[str, Any]:
    """The static arguments that are not at their default."""
    names = ("is_causal", "local_window_size", "logits_soft_cap")
    return {name: getattr(case, name) for name in names if getattr(case, name)}


def draw(case: Case, seed: int) -> Arguments:
    """A program's arguments, normal and on the device."""
    keys = jax.random.split(jax.random.key(seed), 4)
    rows, columns = (case.B, case.T, case.N, case.H), (case.B, case.S, case.K, case.H)
    query, key, value, dout = (
        jax.random.normal(key, shape, case.dtype)
        for key, shape in zip(keys, (rows, columns, columns, rows), strict=True)
    )
    lengths = case.key_value_seq_lengths
    others = {} if lengths is None else {"key_value_seq_lengths": jnp.array(lengths, jnp.int32)}
    return {"query": query, "key": key, "value": value}, others, dout


def reduced(case: Case) -> Case:
    """A problem of the same options, dtype, head dim and group that the reference can afford."""
    factor = math.ceil(case.S / _LARGEST_JUDGED_LENGTH)
    length = case.S // factor
    lengths, window = case.key_value_seq_lengths, case.local_window_size
    key_heads = min(case.K, 2)
    return dataclasses.replace(
        case,
        B=1 if lengths is None else 2,
        T=length,
        S=length,
        N=key_heads * case.N // case.K,
        K=key_heads,
        key_value_seq_lengths=lengths and tuple(math.ceil(x / factor) for x in lengths[:2]),
        # Not narrower than the blocks, so that some of these hold no masked pair.
        local_window_size=window and (min(window[0], length // 4), min(window[1], length // 4)),
        # Errors are relative to the largest entry, and a flat mean over a thousand keys is small:
        # it could be a tenth off unseen. A cap of 50 shows in logits of several tens only.
        spread=2.0 if case.logits_soft_cap is None else 4.0,
    )
