"""The public functions: what they promise and their defaults. Validate, choose a backend, call."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_flash import autodiff, backends, sharding
from pallas_flash.spec import AttentionOutput, AttentionSpec, Precision
from pallas_flash.validate import attention, options
from pallas_flash.validate import decode as decoding


def flash_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    query_offset: ArrayLike = 0,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    precision: str | Precision | None = None,
    implementation: str | backends.Backend | None = None,
) -> jax.Array:
    r"""Scaled dot-product attention in memory linear in the lengths, forward and backward.

    A call written for `jax.nn.dot_product_attention` works unchanged, `return_residual` and the
    implementations' names aside. For each row, over the keys that it may see,

    .. math:: out = \mathrm{softmax}(cap \tanh((scale \cdot q k^T + bias) / cap)) v

    by FlashAttention-2 (Dao, 2023, algorithms 1 and 2). B is the batch (no dim or several will do
    as well), T the query length, S the key length, N the query heads, K the key/value heads, H the
    head dim, Hv the value head dim. Query head n reads key/value head n // (N // K).

    Differentiable once, in reverse mode, in every float operand.

    Differences from `jax.nn`: a row that may see nothing gives 0 and not the mean of all values;
    what lies past `key_value_seq_lengths` does not matter even when it is NaN; the softmax and all
    sums are float32 whatever the inputs.

    Args:
      query: float32, bfloat16 or float16 [B, T, N, H].
      key: of the same dtype, [B, S, K, H], where K divides N.
      value: of the same dtype, [B, S, K, Hv].
      bias: added to the scaled logits. Any float dtype, [B, N, T, S]; each axis may be 1, and
        leading axes may be missing.
      mask: bool of the same shapes, True where a key may be seen.
      scale: factor of the logits, 1 / sqrt(H) by default. Any real number; a scalar array may be
        traced and differentiated.
      is_causal: let a query see no key at a later position. Query i is at position
        i + query_offset, key j at j, also where T and S differ.
      query_seq_lengths: integers [B]. Rows at or past it give 0.
      key_value_seq_lengths: integers [B]. Keys at or past it do not exist.
      local_window_size: (left, right), or one int for both: the query at position i sees the keys
        at i - left to i + right, both included.
      query_offset: position of the first query: an int, an integer scalar array, or integers [B],
        within 2^29.
      query_segment_ids: integers [B, T]; a query sees the keys of its own id.
      key_value_segment_ids: integers [B, S]. One of the two serves for both where T == S.
      logits_soft_cap: bounds the logits to (-cap, cap) before the masks.
      sinks: floats [N], a logit for each query head that joins the softmax's denominator and has
        no value ("attention sinks").
      precision: of products of float32 operands, forward and backward; by default what
        `jax_default_matmul_precision` says. "highest" is IEEE float32; the default may be TF32 on a
        GPU.
      implementation: "triton", "interpret" (the Triton kernels in Pallas's interpreter), "xla", or
        a backend value such as `pallas_flash.backends.xla.XlaBackend(block_q=128)`, which then runs
        or refuses. None takes the fastest that can run.

    Returns:
      [B, T, N, Hv] in the query's dtype.

    Raises:
      ValueError: an argument is malformed; the message says which, what was expected and what came.
      NotImplementedError: the implementation cannot run this call; the message has every reason.
    """
    out, _ = _attend(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        query_offset=query_offset,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        precision=precision,
        implementation=implementation,
        with_lse=False,
    )
    return out


def flash_attention_with_lse(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    query_offset: ArrayLike = 0,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    precision: str | Precision | None = None,
    implementation: str | backends.Backend | None = None,
) -> AttentionOutput:
    """`flash_attention`, and the log of the softmax's denominator for each row.

    Takes what `flash_attention` takes and raises what it raises. Both outputs are differentiable,
    so attention over parts of the keys can be merged, and the merge trained through.

    Returns:
      out: [B, T, N, Hv] in the query's dtype.
      lse: float32 [B, T, N], log(sum(exp(logits))) over the keys that the row sees and its sink:
        natural, after scale, bias and soft cap. -inf for a row that sees nothing and has no sink,
        and for rows past `query_seq_lengths`.
    """
    out, lse = _attend(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        query_offset=query_offset,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        precision=precision,
        implementation=implementation,
        with_lse=True,
    )
    return AttentionOutput(out, lse)


def flash_decode(
    query: ArrayLike,
    key_cache: ArrayLike,
    value_cache: ArrayLike,
    lengths: ArrayLike,
    *,
    scale: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    page_table: ArrayLike | None = None,
    precision: str | Precision | None = None,
    implementation: str | backends.Backend | None = None,
) -> jax.Array:
    """Attention of the newest tokens of each row over all that the row's cache holds.

    What `flash_attention` gives with `is_causal=True, query_offset=lengths - T` and
    `key_value_seq_lengths=lengths`, at the speed at which the keys and values can be read: they are
    split over as many programs as fill the GPU ("Flash-Decoding for long-context inference", Dao,
    Haziza, Massa and Sizov, 2023). Letters are those of `flash_attention`; S is the capacity.

    Without derivatives.

    Args:
      query: float32, bfloat16 or float16 [B, N, H], or [B, T, N, H] for T tokens a row, 16 at most.
        The last of a row sits at position lengths - 1, those before it just before; each sees the
        keys up to its own position.
      key_cache: of the same dtype, [B, S, K, H], where K divides N. The queries' own keys and
        values are in the caches already. With a page table [P, page size, K, H], of any page size.
        A row has 2^29 positions at most.
      value_cache: of the same dtype, [B, S, K, Hv], or [P, page size, K, Hv].
      lengths: integers [B], the number of valid positions, new ones included, from 0 to S. What
        lies past them does not matter, not even NaN. Other lengths are an error, and in an array of
        JAX's, whose numbers are not waited for, the row gives NaN: its newest keys are nowhere.
      scale: factor of the logits, 1 / sqrt(H) by default; a scalar array may be traced.
      local_window_size: as in `flash_attention`. The kernels read no block of keys before it.
      logits_soft_cap: likewise.
      sinks: likewise.
      page_table: integers [B, pages per row]: the page that holds a row's positions from 0, from
        the page size on, and so on; S is pages per row times page size. What entries past a row's
        length and before its window are does not matter; a page among the others that does not
        exist gives NaN to the tokens that see it. ("xla" first gathers each row's pages, all S
        positions.)
      precision: as in `flash_attention`.
      implementation: likewise.

    Returns:
      [B, N, Hv] or [B, T, N, Hv], as the query has it, in its dtype. A token that may see nothing,
      as all do where the length is 0, gives 0.

    Raises:
      ValueError: an argument is malformed; the message says which, what was expected and what came.
      NotImplementedError: the implementation cannot run this call; the message has every reason.
    """
    out, _ = _decode(
        query,
        key_cache,
        value_cache,
        lengths,
        scale=scale,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        page_table=page_table,
        precision=precision,
        implementation=implementation,
        with_lse=False,
    )
    return out


def flash_decode_with_lse(
    query: ArrayLike,
    key_cache: ArrayLike,
    value_cache: ArrayLike,
    lengths: ArrayLike,
    *,
    scale: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    page_table: ArrayLike | None = None,
    precision: str | Precision | None = None,
    implementation: str | backends.Backend | None = None,
) -> AttentionOutput:
    """`flash_decode`, and the log of the softmax's denominator for each row.

    Takes what `flash_decode` takes and raises what it raises.

    Returns:
      out: [B, N, Hv] or [B, T, N, Hv] in the query's dtype.
      lse: float32 [B, N] or [B, T, N], as `flash_attention_with_lse` has it.
    """
    out, lse = _decode(
        query,
        key_cache,
        value_cache,
        lengths,
        scale=scale,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        page_table=page_table,
        precision=precision,
        implementation=implementation,
        with_lse=True,
    )
    return AttentionOutput(out, lse)


def _attend(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None,
    mask: ArrayLike | None,
    *,
    scale: ArrayLike | None,
    is_causal: bool,
    query_seq_lengths: ArrayLike | None,
    key_value_seq_lengths: ArrayLike | None,
    local_window_size: int | tuple[int, int] | None,
    query_offset: ArrayLike,
    query_segment_ids: ArrayLike | None,
    key_value_segment_ids: ArrayLike | None,
    logits_soft_cap: float | None,
    sinks: ArrayLike | None,
    precision: str | Precision | None,
    implementation: str | backends.Backend | None,
    with_lse: bool,
) -> tuple[jax.Array, Any]:
    """out, and lse or None where it is not asked for: a kernel must not write what nobody reads."""
    query, key, value = attention.query_key_value(query, key, value)
    static_scale, traced_scale = options.scale(scale, query.shape[-1])
    spec = AttentionSpec(
        scale=static_scale,
        is_causal=options.is_causal(is_causal),
        local_window_size=options.local_window_size(local_window_size),
        logits_soft_cap=options.logits_soft_cap(logits_soft_cap, static_scale),
        precision=options.precision(precision),
    )
    operands = attention.operands(
        query,
        key,
        value,
        bias=bias,
        mask=mask,
        scale=traced_scale,
        query_offset=query_offset,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        sinks=sinks,
    )
    backend = backends.select(implementation, spec, operands)
    out, lse = autodiff.attention(backend, spec, with_lse, sharding.vary_alike(operands))
    rows = query.shape[:-1]
    return out.reshape(*rows, value.shape[-1]), None if lse is None else lse.reshape(rows)


def _decode(
    query: ArrayLike,
    key_cache: ArrayLike,
    value_cache: ArrayLike,
    lengths: ArrayLike,
    *,
    scale: ArrayLike | None,
    local_window_size: int | tuple[int, int] | None,
    logits_soft_cap: float | None,
    sinks: ArrayLike | None,
    page_table: ArrayLike | None,
    precision: str | Precision | None,
    implementation: str | backends.Backend | None,
    with_lse: bool,
) -> tuple[jax.Array, Any]:
    """As `_attend`."""
    tokens, key_cache, value_cache = decoding.query_and_caches(query, key_cache, value_cache)
    static_scale, traced_scale = options.scale(scale, tokens.shape[-1])
    spec = AttentionSpec(
        scale=static_scale,
        is_causal=True,
        local_window_size=options.local_window_size(local_window_size),
        logits_soft_cap=options.logits_soft_cap(logits_soft_cap, static_scale),
        precision=options.precision(precision),
    )
    operands = decoding.operands(
        tokens,
        key_cache,
        value_cache,
        lengths,
        page_table=page_table,
        scale=traced_scale,
        sinks=sinks,
    )
    backend = backends.select(implementation, spec, operands)
    out, lse = autodiff.decode(backend, spec, with_lse, sharding.vary_alike(operands))
    rows = jnp.shape(query)[:-1]
    return out.reshape(*rows, out.shape[-1]), None if lse is None else lse.reshape(rows)
