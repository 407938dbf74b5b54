"""A call cut into blocks: which blocks there are, what they hold, and the one logit tile.

No operand is padded or laid out anew as a whole: blocks are sliced from the arrays as they come,
and where a length is no multiple of the block, the last block moves back to end at the edge and
what the block before it already covered is masked.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash import masks
from pallas_flash.spec import AttentionSpec, Dims, Operands

# Beyond every offset.
_FAR = 2**30


@dataclass(frozen=True)
class Blocks:
    """An axis of `length` cut into blocks of `size`, the last one moved back to end at the edge."""

    length: int
    size: int

    @classmethod
    def of(cls, length: int, size: int) -> Self:
        return cls(length, max(1, min(size, length)))

    @property
    def count(self) -> int:
        return -(-self.length // self.size)

    def start(self, i: jax.Array) -> jax.Array:
        return jnp.minimum(i * self.size, self.length - self.size)

    def indices(self, i: jax.Array) -> jax.Array:
        return self.start(i) + jnp.arange(self.size, dtype=jnp.int32)

    def is_new(self, i: jax.Array) -> jax.Array | None:
        """Which places no earlier block covered, [size], or None where blocks do not overlap."""
        return None if self.length % self.size == 0 else self.indices(i) >= i * self.size

    def fold(self, first: jax.Array | int, last: jax.Array | int, body: Callable, carry):
        """`fori_loop` over the blocks [first, last). An axis of length 0 has none to trace."""
        if not self.count:
            return carry
        # Indices are int32 throughout, also where `jax_enable_x64` would make them wider.
        return lax.fori_loop(jnp.int32(first), jnp.int32(last), body, carry)


class Tile(NamedTuple):
    """The logits of one block of queries against one block of keys, float32 [B, K, G, bq, bk]."""

    product: jax.Array  # query . key
    logits: jax.Array  # as in point 1 of the contract, -inf where masked
    slope: jax.Array | None  # d capped / d uncapped logit, 1 - tanh^2; None without a cap
    visible: jax.Array | None  # broadcastable to the tile; None where all is


@dataclass(frozen=True)
class Call:
    """One call's operands, cut into blocks: everything the two loops below ask."""

    spec: AttentionSpec
    operands: Operands
    dims: Dims
    queries: Blocks
    keys: Blocks

    @classmethod
    def of(cls, spec: AttentionSpec, operands: Operands, block_q: int, block_k: int) -> Self:
        dims = Dims.of(operands)
        queries = Blocks.of(dims.query_length, block_q)
        keys = Blocks.of(dims.key_length, block_k)
        return cls(spec, operands, dims, queries, keys)

    @property
    def scale(self) -> jax.Array | float:
        return self.spec.scale if self.operands.scale is None else self.operands.scale

    def dot(self, subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
        """A product accumulated in float32. 16-bit operands know one precision only: exact."""
        is_float32 = y.dtype == jnp.float32
        return jnp.einsum(
            subscripts,
            x.astype(y.dtype),
            y,
            precision=self.spec.precision if is_float32 else lax.Precision.DEFAULT,
            preferred_element_type=jnp.float32,
        )

    def is_row(self, i: jax.Array) -> jax.Array | None:
        """Which queries of block i lie before `query_seq_lengths`, [B, 1, 1, bq]; None for all."""
        lengths = self.operands.query_seq_lengths
        if lengths is None:
            return None
        return (self.queries.indices(i)[None] < lengths[:, None])[:, None, None, :]

    def query_tile(self, x: jax.Array, i: jax.Array) -> jax.Array:
        """Block i of [B, T, N, ...] as [B, K, G, bq, ...]."""
        x = lax.dynamic_slice_in_dim(x, self.queries.start(i), self.queries.size, axis=1)
        x = x.reshape(*x.shape[:2], self.dims.key_heads, self.dims.group, *x.shape[3:])
        return jnp.moveaxis(x, 1, 3)

    def from_query_tile(self, tile: jax.Array) -> jax.Array:
        """[B, K, G, bq, ...] as [B, bq, N, ...]."""
        tile = jnp.moveaxis(tile, 3, 1)
        return tile.reshape(*tile.shape[:2], self.dims.query_heads, *tile.shape[4:])

    def query(self, i: jax.Array) -> jax.Array:
        """Query block i, [B, K, G, bq, H]; zero past the length, for 0 * NaN is NaN."""
        tile = self.query_tile(self.operands.query, i)
        is_row = self.is_row(i)
        return tile if is_row is None else jnp.where(is_row[..., None], tile, 0)

    def sinks(self, i: jax.Array) -> jax.Array | None:
        """The sinks of query block i, [B or 1, K, G, bq or 1]; a row past the length has none."""
        if self.operands.sinks is None:
            return None
        sinks = self.operands.sinks.reshape(1, self.dims.key_heads, self.dims.group, 1)
        is_row = self.is_row(i)
        return sinks if is_row is None else jnp.where(is_row, sinks, -jnp.inf)

    def key_tile(self, x: jax.Array, j: jax.Array) -> jax.Array:
        """Block j of [B, S, K, ...] as [B, K, bk, ...]; zero past the length."""
        x = lax.dynamic_slice_in_dim(x, self.keys.start(j), self.keys.size, axis=1)
        lengths = self.operands.key_value_seq_lengths
        if lengths is not None:
            exists = self.keys.indices(j)[None] < lengths[:, None]
            x = jnp.where(exists[:, :, None, None], x, 0)
        return jnp.moveaxis(x, 1, 2)

    def key_blocks(self, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The key blocks [first, last) that some row of query block i may see."""
        queries, operands = self.queries, self.operands
        key_length = self.dims.key_length
        if operands.key_value_seq_lengths is not None:
            longest = jnp.max(operands.key_value_seq_lengths, initial=0)
            key_length = jnp.minimum(longest, key_length)
        q_first = q_last = queries.start(i)
        if operands.query_offset is not None:
            q_first = q_first + jnp.min(operands.query_offset, initial=_FAR)
            q_last = q_last + jnp.max(operands.query_offset, initial=-_FAR)
        start, stop = masks.key_range(self.spec, q_first, q_last + queries.size - 1, key_length)
        if operands.query_seq_lengths is not None:
            is_needed = queries.start(i) < jnp.max(operands.query_seq_lengths, initial=0)
            stop = jnp.where(is_needed, stop, start)
        return masks.blocks(start, stop, self.keys.size)

    def pair_slice(
        self, x: jax.Array, i: jax.Array, j: jax.Array
    ) -> tuple[list[jax.Array], list[int]]:
        """Where the tile (i, j) lies in [B or 1, N or 1, T or 1, S or 1]: starts and sizes."""
        row, column = x.shape[2] > 1, x.shape[3] > 1
        zero = jnp.int32(0)
        starts = [
            zero,
            zero,
            self.queries.start(i) if row else zero,
            self.keys.start(j) if column else zero,
        ]
        sizes = [*x.shape[:2], self.queries.size if row else 1, self.keys.size if column else 1]
        return starts, sizes

    def pair_tile(self, x: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        """The tile (i, j) of a bias or mask, broadcastable to [B, K, G, bq, bk]."""
        tile = lax.dynamic_slice(x, *self.pair_slice(x, i, j))
        heads = (1, 1) if x.shape[1] == 1 else (self.dims.key_heads, self.dims.group)
        return tile.reshape(tile.shape[0], *heads, *tile.shape[2:])

    def visible(self, i: jax.Array, j: jax.Array) -> jax.Array | None:
        """Which pairs of tile (i, j) are seen, broadcastable to [B, K, G, bq, bk]; None for all."""
        operands = self.operands
        conditions = []
        # Rows as [B or 1, bq, 1], columns as [B or 1, 1, bk].
        q_index, k_index = self.queries.indices(i), self.keys.indices(j)
        q_pos, k_pos = q_index[None, :, None], k_index[None, None, :]
        if operands.query_offset is not None:
            q_pos = q_pos + operands.query_offset[:, None, None]
        lengths = operands.key_value_seq_lengths
        q_segment, k_segment = operands.query_segment_ids, operands.key_value_segment_ids
        pairs = masks.visible(
            self.spec,
            q_pos,
            k_pos,
            key_length=None if lengths is None else lengths[:, None, None],
            q_segment=None if q_segment is None else q_segment[:, q_index, None],
            k_segment=None if k_segment is None else k_segment[:, None, k_index],
        )
        if pairs is not None:
            conditions.append(pairs[:, None, None])
        if operands.mask is not None:
            conditions.append(self.pair_tile(operands.mask, i, j))
        is_row = self.is_row(i)
        if is_row is not None:
            conditions.append(is_row[..., None])
        is_new_key = self.keys.is_new(j)
        if is_new_key is not None:
            conditions.append(is_new_key[None, None, None, None, :])
        return functools.reduce(jnp.logical_and, conditions) if conditions else None

    def tile(self, q: jax.Array, k: jax.Array, i: jax.Array, j: jax.Array) -> Tile:
        """The logits of query block i, [B, K, G, bq, H], against key block j, [B, K, bk, H]."""
        product = self.dot("bkgqh,bkjh->bkgqj", q, k)
        logits = self.scale * product
        if self.operands.bias is not None:
            logits += self.pair_tile(self.operands.bias, i, j).astype(jnp.float32)
        slope = None
        cap = self.spec.logits_soft_cap
        if cap is not None:
            tanh = jnp.tanh(logits / cap)
            logits, slope = cap * tanh, 1 - tanh * tanh
        visible = self.visible(i, j)
        if visible is not None:
            logits = jnp.where(visible, logits, -jnp.inf)
        return Tile(product, logits, slope, visible)
