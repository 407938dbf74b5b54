"""What kernels share: one call as a program sees it, and the one logit tile.

A tile is a block of queries against a block of keys, or, where a kernel would rather, its
transpose: positions come as a column and a row, and everything here broadcasts.
"""

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash import masks
from pallas_flash.backends.triton import lowering
from pallas_flash.backends.triton.config import Config
from pallas_flash.backends.triton.softmax import LOG2_E
from pallas_flash.spec import AttentionSpec, DecodeOperands, Dims, Operands

_LEAST_NORMAL = float(jnp.finfo(jnp.float32).tiny)
_LARGEST_FACTOR = float(jnp.finfo(jnp.float32).max) / 2

# Of a traced scale to a soft cap: 2 * log2(e) times that is still finite.
_LARGEST_RATIO = 1e38

# A float32 step of 1 times this is 8e-6 in a logit.
_LARGEST_ROUGH_CAP = 128.0


class Tile(NamedTuple):
    """The logits of a tile: score * factor + offset is the logit in base 2."""

    score: jax.Array  # float32, -inf where masked
    slope: jax.Array | None  # d capped / d uncapped logit, 1 - tanh^2; None without a cap


@dataclass(frozen=True)
class Kernel:
    """What is known of a kernel before it runs.

    Attributes:
      interpret: it runs in Pallas's interpreter.
      is_forward: it needs logits alone, and not their slopes.
      gives_lse: logits have to be as accurate as float32 is, and not as what is left of them in a
        16-bit output.
    """

    spec: AttentionSpec
    dims: Dims
    config: Config
    interpret: bool
    is_forward: bool
    gives_lse: bool = False

    @property
    def has_full_blocks(self) -> bool:
        """Whether there can be a block of keys of which each query of a block sees each."""
        return masks.has_full_blocks(self.spec, self.config.block_q, self.config.block_k)


@dataclass(frozen=True)
class BatchRow:
    """A call as the programs of one batch row see it.

    Attributes:
      batch: which batch row, int32 [].
      query_offset: position of its first query.
      query_length: how many queries it has, at most T.
      key_length: how many keys it has, at most S.
      scale: what the caller gave, with its sign.
    """

    kernel: Kernel
    has_16_bits: bool
    has_query_lengths: bool
    has_key_lengths: bool
    batch: jax.Array
    query_offset: jax.Array | int
    query_length: jax.Array | int
    key_length: jax.Array | int
    scale: jax.Array | float

    @classmethod
    def read(cls, kernel: Kernel, refs: Operands, batch: jax.Array) -> Self:
        spec, dims = kernel.spec, kernel.dims

        def length(ref: Any, most: int) -> jax.Array | int:
            return most if ref is None else jnp.minimum(ref[batch], most)

        return cls(
            kernel=kernel,
            has_16_bits=refs.query.dtype != jnp.float32,
            has_query_lengths=refs.query_seq_lengths is not None,
            has_key_lengths=refs.key_value_seq_lengths is not None,
            batch=batch,
            query_offset=0 if refs.query_offset is None else refs.query_offset[batch],
            query_length=length(refs.query_seq_lengths, dims.query_length),
            key_length=length(refs.key_value_seq_lengths, dims.key_length),
            scale=spec.scale if refs.scale is None else refs.scale[...],
        )

    @classmethod
    def decoding(cls, kernel: Kernel, refs: DecodeOperands, batch: jax.Array) -> Self:
        """Likewise of a decoding call. The last query sits where the row's keys end."""
        dims = kernel.dims
        length = jnp.minimum(jnp.maximum(refs.lengths[batch], 0), dims.key_length)
        return cls(
            kernel=kernel,
            has_16_bits=refs.query.dtype != jnp.float32,
            has_query_lengths=False,
            has_key_lengths=True,
            batch=batch,
            query_offset=length - dims.query_length,
            query_length=dims.query_length,
            key_length=length,
            scale=kernel.spec.scale if refs.scale is None else refs.scale[...],
        )

    @property
    def has_ragged_queries(self) -> bool:
        """Whether a block may hold queries that do not exist."""
        return (
            self.has_query_lengths or self.kernel.dims.query_length % self.kernel.config.block_q > 0
        )

    @property
    def has_ragged_keys(self) -> bool:
        """Whether a block may hold keys that do not exist."""
        return self.has_key_lengths or self.kernel.dims.key_length % self.kernel.config.block_k > 0

    @property
    def factor(self) -> jax.Array | float:
        """What takes a score to a logit in base 2, but for the offset; > 0."""
        cap = self.kernel.spec.logits_soft_cap
        if cap is not None:
            return 2 * cap * LOG2_E
        if isinstance(self.scale, float):
            return LOG2_E if _is_zero(self.scale) else abs(self.scale) / self.prefactor * LOG2_E
        size = jnp.where(_is_zero(self.scale), 1.0, jnp.abs(self.scale))
        return size / self.prefactor * LOG2_E

    @property
    def offset(self) -> float:
        """What a logit in base 2 is above score * factor."""
        cap = self.kernel.spec.logits_soft_cap
        return -cap * LOG2_E if cap is not None and self.has_rough_cap else 0.0

    @property
    def has_rough_cap(self) -> bool:
        """Whether a soft cap's tanh may be some float32 steps of 1 off near 0."""
        cap = self.kernel.spec.logits_soft_cap
        is_small = cap is not None and cap <= _LARGEST_ROUGH_CAP
        return is_small and self.has_16_bits and not self.kernel.gives_lse

    @property
    def prefactor(self) -> jax.Array | float:
        """What of the scale goes into scores, so that the largest leave a finite factor."""
        if isinstance(self.scale, float):
            return 4.0 if abs(self.scale) > _LARGEST_FACTOR else 1.0
        return 1.0 + 3.0 * (jnp.abs(self.scale) > _LARGEST_FACTOR).astype(jnp.float32)

    def signed(self, x: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Query or key, whichever is read once, times the sign of the scale, which is exact.

        A score is then taken to its logit by a factor > 0, and the largest score is the largest
        logit. With a scale of 0 it becomes 0 here, and the factor is not.
        """
        if isinstance(self.scale, float):
            sign = 0.0 if _is_zero(self.scale) else math.copysign(self.prefactor, self.scale)
            return x if sign == 1.0 else tuple(sign * piece for piece in x)
        sign = jnp.where(_is_zero(self.scale), 0.0, jnp.sign(self.scale) * self.prefactor)
        return tuple(piece * sign.astype(piece.dtype) for piece in x)

    def rows(self, block: jax.Array, *, is_full: bool) -> tuple[jax.Array, jax.Array | None]:
        """The queries of a block, int32 [block_q], and which of them exist; None: all do.

        A full block has no others: see `fold_keys`.
        """
        rows = block * self.kernel.config.block_q + jnp.arange(
            self.kernel.config.block_q, dtype=jnp.int32
        )
        return rows, rows < self.query_length if self.has_ragged_queries and not is_full else None

    def columns(self, block: jax.Array, *, is_full: bool) -> tuple[jax.Array, jax.Array | None]:
        """The keys of a block, int32 [block_k], and which of them exist; None: all do."""
        columns = block * self.kernel.config.block_k + jnp.arange(
            self.kernel.config.block_k, dtype=jnp.int32
        )
        exists = columns < self.key_length if self.has_ragged_keys and not is_full else None
        return columns, exists

    def key_blocks(self, block: jax.Array) -> masks.Stretch:
        """The key blocks that a query block needs."""
        first = block * self.kernel.config.block_q
        last = jnp.minimum(first + self.kernel.config.block_q, self.query_length) - 1
        return masks.key_blocks(
            self.kernel.spec,
            first + self.query_offset,
            last + self.query_offset,
            _if(first <= last, self.key_length),
            self.kernel.config.block_k,
        )

    def query_blocks(self, block: jax.Array) -> masks.Stretch:
        """The query blocks that need a key block."""
        first = block * self.kernel.config.block_k
        last = jnp.minimum(first + self.kernel.config.block_k, self.key_length) - 1
        return masks.query_blocks(
            self.kernel.spec,
            first,
            last,
            _if(first <= last, self.query_length),
            self.query_offset,
            self.kernel.config.block_q,
        )

    def fold_keys(self, stretch: masks.Stretch, body: Callable, state: Any) -> Any:
        """`state` folded over key blocks.

        `body(key_block, state, is_full)`: with is_full, each query of the one sees each key of the
        other.
        """
        return _fold(
            stretch,
            body,
            state,
            has_partial_start=self.kernel.spec.left is not None,
            has_partial_stop=self.kernel.spec.right is not None or self.has_ragged_keys,
        )

    def fold_queries(self, stretch: masks.Stretch, body: Callable, state: Any) -> Any:
        """`state` folded over query blocks, as in `fold_keys`."""
        return _fold(
            stretch,
            body,
            state,
            has_partial_start=self.kernel.spec.right is not None,
            has_partial_stop=self.kernel.spec.left is not None or self.has_ragged_queries,
        )

    def dot(self, x: tuple[jax.Array, ...], y: tuple[jax.Array, ...]) -> jax.Array:
        """x . y^T over the head dim, which comes in pieces."""
        return _sum(self.product(a, b, (1, 1)) for a, b in zip(x, y, strict=True))

    def dot_row(self, x: tuple[jax.Array, ...], y: tuple[jax.Array, ...]) -> jax.Array:
        """Likewise of one row y, float32 [rows of x]; not for a tensor core."""
        return _sum(
            jnp.sum(a.astype(jnp.float32) * b.astype(jnp.float32)[None, :], axis=1)
            for a, b in zip(x, y, strict=True)
        )

    def weigh(self, p: jax.Array, x: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """p . x for each piece, p rounded to the pieces' dtype."""
        return tuple(self.product(p.astype(piece.dtype), piece, (1, 0)) for piece in x)

    def product(self, x: jax.Array, y: jax.Array, contracted: tuple[int, int]) -> jax.Array:
        """A product accumulated in float32. 16-bit operands know one precision only: exact."""
        over_x, over_y = contracted
        return lax.dot_general(
            x,
            y,
            (((over_x,), (over_y,)), ((), ())),
            precision=self.kernel.spec.precision if x.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )

    def exp2(self, x: jax.Array) -> jax.Array:
        """2^x, float32."""
        return lowering.exp2(x, interpret=self.kernel.interpret)

    def weights(self, score: jax.Array, whole: jax.Array) -> jax.Array:
        """2^(score * factor - whole), float32, to whose shape the last broadcasts."""
        factor = jnp.asarray(self.factor, jnp.float32)
        interpret = self.kernel.interpret
        logit = lowering.fused_difference(score, factor, whole, interpret=interpret)
        return self.exp2(logit)

    def capped(self, product: jax.Array, cap: float) -> tuple[jax.Array, jax.Array]:
        """The score under a soft cap, and its slope: tanh(|scale| * product / cap), 1 - tanh^2."""
        ratio = jnp.minimum(jnp.abs(self.scale) / self.prefactor / cap, _LARGEST_RATIO)
        if not self.has_rough_cap:
            half = 0.5 * jnp.tanh(product * ratio)
            return half, 1.0 - 4.0 * half * half
        # cap * tanh(x) = 2 * cap / (1 + exp(-2 * x)) - cap, of which the last is the offset.
        score = lowering.logistic(
            product * (ratio * (2 * LOG2_E)),
            by_halves=self.kernel.is_forward,
            interpret=self.kernel.interpret,
        )
        return score, 4.0 * score * (1.0 - score)

    def tile(
        self, product: jax.Array, rows: jax.Array, columns: jax.Array, *, is_full: bool
    ) -> Tile:
        """The logits of a tile.

        Args:
          product: signed query . key, float32.
          rows: indices of the queries, int32, broadcastable to it.
          columns: indices of the keys, likewise.
          is_full: each query sees each key.
        """
        score, slope = product, None
        cap = self.kernel.spec.logits_soft_cap
        if cap is not None:
            score, slope = self.capped(product, cap)
        if not is_full:
            visible = masks.visible(
                self.kernel.spec,
                rows + self.query_offset,
                columns,
                key_length=self.key_length if self.has_ragged_keys else None,
            )
            if visible is not None:
                score = jnp.where(visible, score, -jnp.inf)
        return Tile(score, slope)


def _is_zero(scale: jax.Array | float) -> jax.Array | bool:
    """Below its normal numbers a GPU takes float32 for 0, and -inf * 0 is NaN."""
    return abs(scale) < _LEAST_NORMAL


def _sum(terms: Iterable[jax.Array]) -> jax.Array:
    """Of some; `sum` would begin with a 0."""
    return functools.reduce(jnp.add, terms)


def _if(condition: jax.Array, length: jax.Array | int) -> jax.Array:
    """`length`, or 0. (The lowering of a `where` between two constants is wrong in JAX 0.12.)"""
    return condition.astype(jnp.int32) * length


def _fold(
    stretch: masks.Stretch,
    body: Callable,
    state: Any,
    *,
    has_partial_start: bool,
    has_partial_stop: bool,
) -> Any:
    def loop(first: jax.Array, last: jax.Array, state: Any, is_full: bool) -> Any:
        return lax.fori_loop(first, last, lambda i, state: body(i, state, is_full), state)

    if has_partial_start:
        state = loop(stretch.first, stretch.full_first, state, False)
    state = loop(stretch.full_first, stretch.full_last, state, True)
    if has_partial_stop:
        state = loop(stretch.full_last, stretch.last, state, False)
    return state
