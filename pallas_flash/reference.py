"""Attention as the definition has it: dense, in plain `jax.numpy`, for tests to compare with.

It shares no code with what it judges, the masks least of all: a shared predicate hides a shared
bug. Its gradients are JAX's own. Float64 inputs (under `jax.enable_x64`) are computed in float64
throughout; 16-bit inputs as plain attention in that dtype does it: float32 logits and softmax,
probabilities rounded to the inputs' dtype before they meet the values.
"""

import math

import jax
import jax.numpy as jnp

from pallas_flash.spec import AttentionOutput


def reference_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: jax.Array | float | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    query_offset: jax.Array | int = 0,
    query_segment_ids: jax.Array | None = None,
    key_value_segment_ids: jax.Array | None = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> AttentionOutput:
    """The arguments of `flash_attention`, unchecked: one batch dim, and both segment ids or none.

    Returns:
      out [B, T, N, Hv] in the query's dtype, and lse [B, T, N] in float32 or, of float64 inputs,
      float64.
    """
    dtype = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
    batch, query_length, heads, head_dim = query.shape
    key_length, key_heads = key.shape[1:3]
    # [B, 1, T, 1] and [1, 1, 1, S].
    offset = jnp.broadcast_to(jnp.asarray(query_offset, jnp.int32), (batch,))
    position = jnp.arange(query_length, dtype=jnp.int32)[None, :] + offset[:, None]
    position = position[:, None, :, None]
    j = jnp.arange(key_length, dtype=jnp.int32)[None, None, None, :]

    sees = jnp.ones((batch, heads, query_length, key_length), bool)
    if mask is not None:
        sees &= mask
    if is_causal:
        sees &= j <= position
    if local_window_size is not None:
        is_int = isinstance(local_window_size, int)
        left, right = (local_window_size,) * 2 if is_int else local_window_size
        sees &= (position - j <= left) & (j - position <= right)
    if query_segment_ids is not None and key_value_segment_ids is not None:
        sees &= query_segment_ids[:, None, :, None] == key_value_segment_ids[:, None, None, :]
    is_row = jnp.ones((batch, query_length, 1), bool)
    if query_seq_lengths is not None:
        rows = jnp.arange(query_length, dtype=query_seq_lengths.dtype)
        is_row = rows[None, :, None] < query_seq_lengths[:, None, None]
        query = jnp.where(is_row[..., None], query, 0)
        sees &= is_row[:, None]
    if key_value_seq_lengths is not None:
        columns = jnp.arange(key_length, dtype=key_value_seq_lengths.dtype)
        exists = columns[None] < key_value_seq_lengths[:, None]
        key = jnp.where(exists[..., None, None], key, 0)
        value = jnp.where(exists[..., None, None], value, 0)
        sees &= exists[:, None, None, :]

    key, value = (jnp.repeat(x, heads // key_heads, axis=2) for x in (key, value))
    factor = jnp.asarray(1 / math.sqrt(head_dim) if scale is None else scale, dtype)
    logits = factor * jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=dtype)
    if bias is not None:
        logits += bias.astype(dtype)
    if logits_soft_cap is not None:
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    logits = jnp.where(sees, logits, -jnp.inf)

    if sinks is not None:
        sinks = jnp.where(is_row, sinks.astype(dtype)[None, None], -jnp.inf)
        sinks = jnp.swapaxes(sinks, 1, 2)[..., None]
    probabilities, lse = _softmax(logits, sinks)
    probabilities = probabilities.astype(value.dtype)
    out = jnp.einsum("bnts,bsnh->btnh", probabilities, value, preferred_element_type=dtype)
    return AttentionOutput(out.astype(query.dtype), jnp.swapaxes(lse, 1, 2))


def _softmax(logits: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Probabilities [B, N, T, S] and lse [B, N, T]; sinks [B, N, T, 1] join the denominator."""
    most = jnp.max(logits, axis=-1, keepdims=True, initial=-jnp.inf)
    if sinks is not None:
        most = jnp.maximum(most, sinks)
    most = jax.lax.stop_gradient(jnp.where(jnp.isneginf(most), 0, most))
    weights = jnp.exp(logits - most)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total += jnp.exp(sinks - most)
    is_empty = total == 0
    total = jnp.where(is_empty, 1, total)
    lse = jnp.where(is_empty, -jnp.inf, jnp.log(total) + most)
    return weights / total, lse[..., 0]
