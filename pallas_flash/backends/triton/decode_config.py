"""How decoding is cut into tiles and split over programs, and what is picked for a call.

What is best was measured on an H200 only; every pick fits the smallest shared memory that a card of
compute capability 8.0 or later has, which a test holds.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash.backends.triton.config import (
    SMALLEST,
    Config,
    Products,
    power_of_two,
    widths,
)
from pallas_flash.spec import AttentionSpec, Dims

# What a warp merges of partial outputs at a time: 128 float32 a thread. Half as many by twice the
# warps take up to 1.4 times as long, twice as many by half the warps up to 1.6 times (32 to 512
# parts of 64 to 256 entries, H200).
_WARP_ENTRIES = 4096

# Of one row's blocks.
_MOST_SPLITS = 1024


@dataclass(frozen=True)
class DecodeConfig:
    """Of the kernel that decodes.

    Attributes:
      tile: its tiles. Their rows are pairs of a new token and a query head of one group.
      splits: into how many parts, each the work of a program, a row's blocks are split; 1 to 1024.
    """

    tile: Config
    splits: int

    def __post_init__(self) -> None:
        if not isinstance(self.tile, Config):
            raise ValueError(f"tile: expected a Config, got {self.tile!r}")
        if type(self.splits) is not int or not 1 <= self.splits <= _MOST_SPLITS:
            raise ValueError(f"splits: expected an int, 1 to {_MOST_SPLITS}, got {self.splits!r}")

    def tiles(self, dims: Dims) -> int:
        """How many there are for one key head of one batch row."""
        return -(-dims.query_length * dims.group // self.tile.block_q)

    def part_size(self, blocks: jax.Array) -> jax.Array:
        """How many of a row's so many blocks, int32 [], each of its parts has.

        That hangs on the row and not on its cache: of a row that is far shorter, most parts of the
        cache would be empty, and most of the GPU had nothing to do.
        """
        return lax.div(blocks + (self.splits - 1), jnp.int32(self.splits))

    def merge_tile(self, dims: Dims) -> tuple[int, int]:
        """How many parts are merged at a time, and by how many warps."""
        width = power_of_two(sum(widths(dims.value_head_dim)))
        parts = power_of_two(self.splits)
        warps = max(1, min(parts * width // _WARP_ENTRIES, 8))
        return min(parts, warps * _WARP_ENTRIES // width), warps


# What a GPU is taken to have of multiprocessors where nobody can tell.
_MULTIPROCESSORS = 128

# What a block of keys and values takes, for its loads to be in flight long enough.
_BLOCK_BYTES = 2**15

# What queries of a tile may take, for them and three blocks to fit in any card's shared memory.
_QUERY_BYTES = 2**14

# Parts of fewer keys cost more to merge than they gain where programs are many.
_LONG_PART = 1024


def pick_decode(
    spec: AttentionSpec, dims: Dims, dtype: jnp.dtype, multiprocessors: int | None
) -> DecodeConfig:
    """The config for a call.

    Args:
      spec: its static half.
      dims: its sizes.
      dtype: of query, key and value.
      multiprocessors: how many the device has; None where that is not known.
    """
    tile = _tile(spec, dims, dtype)
    blocks = _most_blocks(spec, dims, tile)
    tiles = max(1, dims.batch * dims.key_heads * DecodeConfig(tile, 1).tiles(dims))
    multiprocessors = multiprocessors or _MULTIPROCESSORS
    # With 512 bytes a key, two programs of a multiprocessor read as fast as it can. Up to so many
    # they all begin at once: with 128 tiles of 8192 keys two parts are 5 to 10 % faster than four
    # or eight, and with 8 of 32768 keys 32 parts are 3 to 14 % faster than 16 or 64. Exact float32
    # products take longer than the keys they are of.
    is_small = _row_bytes(dims, dtype) <= 256
    is_exact = Products.of(dtype, spec.precision) is Products.EXACT
    at_once = (4 if is_small or is_exact else 2) * multiprocessors
    if tiles <= at_once:
        splits = min(at_once // tiles, -(-blocks // 2), _MOST_SPLITS)
    else:
        # Then they should be so many that it does not matter how few the last are: 512 tiles of
        # 4096 keys take 8 % longer whole than in four parts, and as much when lengths differ.
        splits = min(16 * multiprocessors // tiles, blocks * tile.block_k // _LONG_PART)
    # No more than have fewer blocks.
    longest = -(-blocks // max(1, splits))
    return DecodeConfig(tile, max(1, -(-blocks // longest)))


def _tile(spec: AttentionSpec, dims: Dims, dtype: jnp.dtype) -> Config:
    """How tiles are cut, whatever the number of parts.

    Beside up to 27 others it was the fastest or within 3 % of it in each of 26 problems, with exact
    products within 11 % in each of two (H200).
    """
    width = power_of_two(max(sum(widths(dims.head_dim)), sum(widths(dims.value_head_dim))))
    block_k = _BLOCK_BYTES // power_of_two(_row_bytes(dims, dtype))
    block_k = max(SMALLEST, min(block_k, 64))
    if Products.of(dtype, spec.precision) is Products.EXACT:
        return Config(SMALLEST, min(block_k, 32), 2, 2)
    rows = power_of_two(dims.query_length * dims.group)
    block_q = max(SMALLEST, min(rows, _QUERY_BYTES // (width * jnp.dtype(dtype).itemsize), 64))
    return Config(block_q, block_k, 2 if block_q * width <= 32 * 128 else 4, 3)


def _most_blocks(spec: AttentionSpec, dims: Dims, tile: Config) -> int:
    """How many key blocks a batch row may need, 1 at least."""
    blocks = max(1, tile.key_blocks(dims))
    if spec.left is None:
        return blocks
    # Where those that a window reaches begin in the middle of a block, they end in one more.
    return min(blocks, -(-(spec.left + dims.query_length) // tile.block_k) + 1)


def _row_bytes(dims: Dims, dtype: jnp.dtype) -> int:
    """What a key and its value take."""
    return (dims.head_dim + dims.value_head_dim) * jnp.dtype(dtype).itemsize
