"""FlashAttention's first order of loops: algorithm 1 of Dao et al., 2022, one program for a head.

The outer loop goes over blocks of keys and the inner one over blocks of queries, so that each block
of queries is visited once for every block of keys, and its output and statistics go to memory and
back at each visit. There are as many programs as heads in the batch. FlashAttention-2 (Dao, 2023)
turned the loops around: a program has one block of queries, whose sums stay in registers.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton

from pallas_flash.backends.triton import lowering, memory, softmax
from pallas_flash.backends.triton.config import Config

_HEAD_DIMS = (16, 32, 64, 128, 256)


def _config(head_dim: int, dtype: jnp.dtype) -> Config:
    """What an A100 and an H200 have the shared memory and the registers for.

    The wider a block of keys, the fewer times the output goes to memory and back.
    """
    if head_dim <= 64:
        return Config(128, 128, 8, 1)
    if dtype == jnp.float32:
        return Config(64, 64, 8, 1) if head_dim == 128 else Config(32, 32, 8, 1)
    return Config(64, 128, 8, 1) if head_dim == 128 else Config(32, 64, 8, 1)


def _block(index: jax.Array | int, size: int, length: int) -> tuple[jax.Array, jax.Array | None]:
    """The positions of a block, int32 [size], and which of them exist; None: all do."""
    positions = index * size + jnp.arange(size, dtype=jnp.int32)
    return positions, positions < length if length % size else None


def _product(x: jax.Array, y: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    """Of matrices, over an axis of each, accumulated in float32."""
    over_x, over_y = contracted
    return lax.dot_general(
        x, y, (((over_x,), (over_y,)), ((), ())), preferred_element_type=jnp.float32
    )


def _kernel(
    config: Config,
    is_causal: bool,
    interpret: bool,
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    out_ref: Any,
    m_ref: Any,
    l_ref: Any,
) -> None:
    _, query_length, heads, head_dim = query_ref.shape
    _, key_length, key_heads, _ = key_ref.shape
    head, batch = lowering.program(heads)
    key_head = lax.div(head, jnp.int32(heads // key_heads))
    factor = softmax.LOG2_E / math.sqrt(head_dim)
    exp2 = functools.partial(lowering.exp2, interpret=interpret)

    def barrier() -> None:
        # The interpreter has one thread, and knows no barrier.
        if not interpret:
            triton.debug_barrier()

    def read_state(rows: jax.Array, exists: jax.Array | None) -> softmax.SoftmaxState:
        (out,) = memory.read(out_ref, batch, rows, head, exists)
        m = lowering.load(m_ref.at[batch, head, rows], mask=exists)
        l = lowering.load(l_ref.at[batch, head, rows], mask=exists)  # noqa: E741
        return softmax.SoftmaxState(m, l, (out * l[:, None],))

    def write_state(rows: jax.Array, exists: jax.Array | None, state: softmax.SoftmaxState) -> None:
        (acc,) = state.acc
        memory.write(out_ref, batch, rows, head, exists, (acc * (1.0 / state.l)[:, None],))
        lowering.store(m_ref.at[batch, head, rows], state.m, mask=exists)
        lowering.store(l_ref.at[batch, head, rows], state.l, mask=exists)

    def visit_all(j: jax.Array | int, *, is_first: bool) -> None:
        """The inner loop: what a block of keys adds to all blocks of queries that see any of it."""
        columns, column_exists = _block(j, config.block_k, key_length)
        (k,) = memory.read(key_ref, batch, columns, key_head, column_exists)
        (v,) = memory.read(value_ref, batch, columns, key_head, column_exists)

        def weigh(p: jax.Array) -> tuple[jax.Array]:
            return (_product(p.astype(v.dtype), v, (1, 0)),)

        def visit(i: jax.Array, _: None) -> None:
            rows, row_exists = _block(i, config.block_q, query_length)
            (q,) = memory.read(query_ref, batch, rows, head, row_exists)
            if is_first:
                state = softmax.init(config.block_q, (head_dim,))
            else:
                state = read_state(rows, row_exists)
            s = _product(q, k, (1, 1))
            if column_exists is not None:
                s = jnp.where(column_exists[None, :], s, -jnp.inf)
            if is_causal:
                s = jnp.where(columns[None, :] <= rows[:, None], s, -jnp.inf)
            state = softmax.update(state, s, factor, exp2, weigh)
            # Several threads may hold an element that one of them writes: not before all have read.
            barrier()
            write_state(rows, row_exists, state)

        first = lax.div(j * jnp.int32(config.block_k), jnp.int32(config.block_q))
        lax.fori_loop(first if is_causal else 0, -(-query_length // config.block_q), visit, None)
        # What is written here is read again for the next block of keys, by other threads than wrote
        # it: the compiler deals a block out among threads anew for each read and write, and guards
        # shared memory alone. They see each other's writes from a barrier on.
        barrier()

    # The first block of keys writes what the others read: nothing has to be there before.
    visit_all(0, is_first=True)
    seen = min(query_length, key_length) if is_causal else key_length
    lax.fori_loop(1, -(-seen // config.block_k), lambda j, _: visit_all(j, is_first=False), None)


@functools.partial(jax.jit, static_argnames=("is_causal", "interpret", "config"))
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    is_causal: bool = False,
    interpret: bool = False,
    config: Config | None = None,
) -> jax.Array:
    """Attention by one kernel, without a gradient.

    Query head n reads key/value head n // (N // K). Where algorithm 1 takes p by the maximum of its
    block and then to the new one, p is taken by the new one at once. The output is kept in float32
    between visits, as the authors' own kernels do, for it would be rounded at each.

    Args:
      query: [B, T, N, H].
      key: [B, S, K, H].
      value: [B, S, K, H].
      is_causal: query i sees keys up to i.
      interpret: run in Pallas's interpreter.
      config: of the kernel; None picks it.

    Returns:
      [B, T, N, H], in the query's dtype.
    """
    batch, query_length, heads, head_dim = query.shape
    if head_dim not in _HEAD_DIMS:
        raise NotImplementedError(f"H: expected a power of two, 16 to 256, got {head_dim}")
    if config is None:
        config = _config(head_dim, query.dtype)
    config = config.fitted(query_length, key.shape[1])
    row = jax.ShapeDtypeStruct((batch, heads, query_length), jnp.float32)
    out, _, _ = lowering.launch(
        functools.partial(_kernel, config, is_causal, interpret),
        name="flash_attention_1_forward",
        programs=batch * heads,
        outputs=[jax.ShapeDtypeStruct(query.shape, jnp.float32), row, row],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        like=query,
    )(query, key, value)
    return out.astype(query.dtype)
