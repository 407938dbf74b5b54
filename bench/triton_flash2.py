"""FlashAttention-2's forward (Dao, 2023, algorithm 1) in Triton itself, called from JAX.

The plain kernel that `pallas_flash.backends.triton` ports to Pallas, to time side by side with the
port: one program for a block of queries of one head, an online softmax over blocks of keys, one
division at the end. It needs jax-triton.
"""

import inspect
import math
from typing import NamedTuple

import jax
import jax_triton
import triton
import triton.language as tl

# jax-triton 0.4 has another name for what 0.3 calls "out_shape".
_PARAMETERS = inspect.signature(jax_triton.triton_call).parameters
_OUT_TYPE = "out_type" if "out_type" in _PARAMETERS else "out_shape"

# The least side of a tile that `tl.dot` takes, and the largest head dim in the table below.
_LEAST_HEAD_DIM, _LARGEST_HEAD_DIM = 16, 256


class Blocks(NamedTuple):
    """How the kernel is cut and compiled.

    Attributes:
      block_q: queries in a tile.
      block_k: keys in a tile.
      num_warps: warps of 32 threads in a program.
      num_stages: how many blocks of keys and values are in flight at a time.
    """

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int


# By bytes of an entry, then by the largest head dim. What a program holds fits in a Hopper's 227 KB
# of shared memory and in its registers, but for some tens of bytes at H = 128, causal.
_BLOCKS = {
    2: {64: Blocks(128, 64, 4, 3), 128: Blocks(128, 64, 4, 2), 256: Blocks(128, 64, 8, 2)},
    4: {64: Blocks(128, 32, 4, 2), 128: Blocks(64, 32, 4, 2), 256: Blocks(64, 32, 8, 2)},
}


def pick(head_dim: int, dtype: jax.typing.DTypeLike) -> Blocks:
    """The blocks for a head dim and a dtype."""
    table = _BLOCKS[jax.numpy.dtype(dtype).itemsize]
    return next(blocks for largest, blocks in table.items() if head_dim <= largest)


@triton.jit
def _kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    out_ptr,
    T: tl.constexpr,
    S: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    factor: tl.constexpr,
    is_causal: tl.constexpr,
    block_q: tl.constexpr,
    block_k: tl.constexpr,
):
    """A block of queries of one head.

    Args:
      query_ptr, out_ptr: to [B, T, N, H].
      key_ptr, value_ptr: to [B, S, K, H].
      factor: what makes a product of query and key a logit in base 2.
    """
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    # The longest first, so that the short ones fill what is left of the card at the end.
    if is_causal:
        block = tl.num_programs(0) - 1 - block
    query_start = block * block_q
    rows = query_start + tl.arange(0, block_q)
    columns = tl.arange(0, block_k)
    features = tl.arange(0, H)[None, :]
    # An array may have more than 2^31 entries, a tile spans fewer.
    query_base = ((batch * T + query_start) * N + head) * H
    query_tile = query_base + tl.arange(0, block_q)[:, None] * (N * H) + features
    key_base = (batch * S * K + head // (N // K)) * H
    key_tile = key_base + columns[:, None] * (K * H) + features
    q = tl.load(query_ptr + query_tile, mask=rows[:, None] < T, other=0.0)

    # Of the keys so far: the largest logit, the sum of 2^(logit - largest), and that of the values
    # with these weights. The paper's m, l and O, but for O's division, which is left to the end.
    largest = tl.full((block_q,), -float("inf"), tl.float32)
    total = tl.zeros((block_q,), tl.float32)
    weighted = tl.zeros((block_q, H), tl.float32)
    # What the first row sees all rows see; what the last one does not see none does.
    full = (tl.minimum(query_start + 1, S) if is_causal else S) // block_k
    last = tl.cdiv(tl.minimum(query_start + block_q, S) if is_causal else S, block_k)
    # First the blocks that are full, then those that hold hidden pairs or end past the last key.
    for is_masked in tl.static_range(2):
        for j in range(full if is_masked else 0, last if is_masked else full):
            key_start = j * block_k
            tile = key_tile + key_start.to(tl.int64) * (K * H)
            exists = key_start + columns < S
            if is_masked:
                k = tl.load(key_ptr + tile, mask=exists[:, None], other=0.0)
                v = tl.load(value_ptr + tile, mask=exists[:, None], other=0.0)
            else:
                k = tl.load(key_ptr + tile)
                v = tl.load(value_ptr + tile)
            # float32 operands are rounded to TF32, as JAX's products are by default.
            s = tl.dot(q, tl.trans(k), input_precision="tf32")
            if is_masked:
                sees = exists[None, :]
                if is_causal:
                    sees &= rows[:, None] >= key_start + columns[None, :]
                s = tl.where(sees, s, -float("inf"))
            # Every row sees key 0, so that from the first block on none is -inf.
            new_largest = tl.maximum(largest, tl.max(s, axis=1) * factor)
            p = tl.exp2(s * factor - new_largest[:, None])
            correction = tl.exp2(largest - new_largest)
            total = total * correction + tl.sum(p, axis=1)
            weighted *= correction[:, None]
            weighted = tl.dot(p.to(v.dtype), v, weighted, input_precision="tf32")
            largest = new_largest
    out = (weighted / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + query_tile, out, mask=rows[:, None] < T)


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    is_causal: bool = False,
    blocks: Blocks | None = None,
) -> jax.Array:
    """softmax(query @ key^T / sqrt(H)) @ value; query head n reads key/value head n // (N // K).

    Args:
      query: [B, T, N, H], float32, bfloat16 or float16; H a power of two.
      key: [B, S, K, H].
      value: [B, S, K, H].
      is_causal: query i sees keys up to i.
      blocks: how to cut it; by default as `pick` says.

    Returns:
      [B, T, N, H] in the query's dtype.
    """
    (B, T, N, H), (_, S, K, _) = query.shape, key.shape
    if H & (H - 1) or not _LEAST_HEAD_DIM <= H <= _LARGEST_HEAD_DIM:
        sizes = f"{_LEAST_HEAD_DIM} to {_LARGEST_HEAD_DIM}"
        raise NotImplementedError(f"head dim: expected a power of two, {sizes}, got H = {H}")
    blocks = blocks or pick(H, query.dtype)
    return jax_triton.triton_call(
        query,
        key,
        value,
        kernel=_kernel,
        grid=(triton.cdiv(T, blocks.block_q), N, B),
        T=T,
        S=S,
        N=N,
        K=K,
        H=H,
        factor=math.log2(math.e) / math.sqrt(H),
        is_causal=is_causal,
        **blocks._asdict(),
        **{_OUT_TYPE: jax.ShapeDtypeStruct(query.shape, query.dtype)},
    )
