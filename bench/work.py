"""How much work a case is: pairs that are seen, operations, bytes."""

import jax.numpy as jnp
import numpy as np

from pallas_flash.testing import Case

# Which pairs these leave is not reckoned here: no problem has them.
_UNCOUNTED = ("query_offset", "query_seq_lengths", "segments", "mask")


def _visible_keys(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Each query's first visible key and the one after its last, both [batch, T].

    Where it sees none, both are the same.
    """
    if any(getattr(case, name) for name in _UNCOUNTED):
        raise ValueError(f"case: expected none of {', '.join(_UNCOUNTED)}, got {case}")
    i = np.arange(case.T)
    left, right = case.local_window_size or (case.T, case.S)
    lengths = np.minimum(case.S, case.key_value_seq_lengths or (case.S,) * case.B)[:, None]
    start = np.maximum(0, i - left) + np.zeros_like(lengths)
    stop = np.minimum(lengths, i + (0 if case.is_causal else right) + 1)
    return start, np.maximum(start, stop)


def visible_pairs(case: Case) -> int:
    """How many (query, key) pairs are not masked, over the batch, in one head."""
    start, stop = _visible_keys(case)
    return int((stop - start).sum())


def share_of_pairs(case: Case) -> float:
    """Of the pairs that there are without a mask."""
    return visible_pairs(case) / (case.B * case.T * case.S)


def flops(case: Case, with_gradients: bool) -> int:
    """A multiplication and an addition for each visible pair, head and feature of a product.

    Forward q.k and p.v. With gradients also q.k once more, dp, and dq and dk over the key's head
    dim, dv over the value's.
    """
    key_products, value_products = (4, 3) if with_gradients else (1, 1)
    features = key_products * case.H + value_products * case.value_head_dim
    return 2 * visible_pairs(case) * case.N * features


def least_bytes(case: Case, with_gradients: bool) -> int:
    """What must move: rows of the inputs that matter read once, the results written once.

    Forward query, key, value and out; with gradients also dout and the three gradients.
    """
    start, stop = _visible_keys(case)
    sees = stop > start
    # Windows and causality leave no gap between the keys that some query of a batch row sees.
    first = np.where(sees, start, case.S).min(axis=1, initial=case.S)
    end = np.where(sees, stop, 0).max(axis=1, initial=0)
    seen_keys = int(np.maximum(0, end - first).sum())
    query_row, out_row = case.N * case.H, case.N * case.value_head_dim
    key_row, value_row = case.K * case.H, case.K * case.value_head_dim
    numbers = int(sees.sum()) * query_row + seen_keys * (key_row + value_row)
    numbers += case.B * case.T * out_row
    if with_gradients:
        numbers += int(sees.sum()) * out_row
        numbers += case.B * (case.T * query_row + case.S * (key_row + value_row))
    return numbers * jnp.dtype(case.dtype).itemsize
