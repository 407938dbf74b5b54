"""JAX's own attention, called as `flash_attention` and `flash_decode` are, to compare with.

What `jax.nn.dot_product_attention` takes goes to it as it is; where queries sit elsewhere than at
the first key, and for segments, what each may see is spelled out as a mask.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_flash.spec import Precision


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    query_offset: jax.Array | None = None,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    query_segment_ids: jax.Array | None = None,
    logits_soft_cap: float | None = None,
    scale: float | None = None,
    sinks: jax.Array | None = None,
    precision: str | Precision | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
) -> jax.Array:
    """As `flash_attention`; `implementation` is one of `jax.nn`'s."""
    _refuse(logits_soft_cap=logits_soft_cap, sinks=sinks, precision=precision)
    mask = None
    if query_offset is not None:
        mask = _visible(query, key, query_offset, is_causal, local_window_size)
        is_causal, local_window_size = False, None
    if query_segment_ids is not None:
        is_own = query_segment_ids[:, None, :, None] == query_segment_ids[:, None, None, :]
        mask = is_own if mask is None else mask & is_own
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=mask,
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        implementation=implementation,
    )


def decode(
    query: jax.Array,
    key_cache: jax.Array,
    value_cache: jax.Array,
    lengths: jax.Array,
    *,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    scale: float | None = None,
    sinks: jax.Array | None = None,
    page_table: jax.Array | None = None,
    precision: str | Precision | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
) -> jax.Array:
    """As `flash_decode`, of a contiguous cache, with queries [B, T, N, H]."""
    _refuse(page_table=page_table)
    is_one = query.shape[1] == 1 and local_window_size is None
    return attention(
        query,
        key_cache,
        value_cache,
        # One query sees all that is valid, and no mask is needed.
        is_causal=not is_one,
        query_offset=None if is_one else lengths - query.shape[1],
        local_window_size=local_window_size,
        key_value_seq_lengths=lengths,
        logits_soft_cap=logits_soft_cap,
        scale=scale,
        sinks=sinks,
        precision=precision,
        implementation=implementation,
    )


def _visible(
    query: jax.Array,
    key: jax.Array,
    query_offset: jax.Array,
    is_causal: bool,
    window: int | tuple[int, int] | None,
) -> jax.Array:
    """A mask [B, 1, T, S] for queries from `query_offset` [B] on."""
    query_positions = query_offset[:, None] + jnp.arange(query.shape[1], dtype=jnp.int32)[None]
    key_positions = jnp.arange(key.shape[1], dtype=jnp.int32)
    # How far before the query the key is.
    distance = query_positions[:, None, :, None] - key_positions[None, None, None, :]
    left, right = window if isinstance(window, tuple) else (window, window)
    is_visible = distance >= 0 if is_causal else jnp.ones_like(distance, bool)
    if left is not None and right is not None:
        is_visible &= (distance <= left) & (distance >= -right)
    return is_visible


def _refuse(**options: object) -> None:
    """What JAX's own attention has not."""
    for name, x in options.items():
        if x is not None:
            raise NotImplementedError(f"jax.nn.dot_product_attention takes no {name}, got {x!r}")
