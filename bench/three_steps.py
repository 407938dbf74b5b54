"""Attention in three separate steps, each matrix written to memory: what flash attention avoids.

The standard implementation that FlashAttention sets out from (Dao et al., 2022, algorithm 0).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax


@functools.partial(jax.jit, static_argnames="is_causal")
def attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, is_causal: bool = False
) -> jax.Array:
    """Logits, their softmax, and the weighted values, one after the other.

    Query head n reads key/value head n // (N // K). With B * N * T * S logits in float32 and as
    many weights in the inputs' dtype.

    Args:
      query: [B, T, N, H].
      key: [B, S, K, H].
      value: [B, S, K, H].
      is_causal: query i sees keys up to i.

    Returns:
      [B, T, N, H], in the query's dtype.
    """
    (batch, query_length, heads, head_dim), (_, key_length, key_heads, _) = query.shape, key.shape
    q = query.reshape(batch, query_length, key_heads, heads // key_heads, head_dim)

    # [B, K, N // K, T, S], as [B, N, T, S] in memory.
    logits = jnp.einsum("btkgh,bskh->bkgts", q, key, preferred_element_type=jnp.float32)
    logits *= head_dim**-0.5
    if is_causal:
        logits = jnp.where(jnp.tri(query_length, key_length, dtype=bool), logits, -jnp.inf)
    # Without a barrier XLA is free to fuse one step with the next and to write no matrix between.
    logits = lax.optimization_barrier(logits)

    weights = jax.nn.softmax(logits, axis=-1).astype(value.dtype)
    weights = lax.optimization_barrier(weights)

    out = jnp.einsum("bkgts,bskh->btkgh", weights, value, preferred_element_type=jnp.float32)
    return out.reshape(query.shape).astype(query.dtype)
