"""How each kernel is cut into blocks and compiled, and what is picked for a call.

The picks keep every kernel within the shared memory of the smallest card of its compute capability,
less a tenth for another compiler; a test compiles them and holds that. Those for 16-bit operands
on compute capability 9.0 were measured, on an H200; the others rest on what the compiler says
(shared memory, spills).
"""

import enum
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_flash.spec import Dims, Precision

# The least side of a tile that a tensor core's product takes.
SMALLEST = 16

# What a program may have of shared memory, in KiB, by compute capability (CUDA C++ Programming
# Guide, "Technical Specifications per Compute Capability"). Cards not named here, and no card at
# all, get what the smallest has.
_SHARED_MEMORY = {"8.0": 163, "8.7": 163, "9.0": 227, "10.0": 227, "10.3": 227, "11.0": 227}
_LEAST_SHARED_MEMORY = 99


@dataclass(frozen=True)
class Config:
    """How one kernel is cut and compiled.

    Attributes:
      block_q: queries in a tile, a power of two >= 16.
      block_k: keys in a tile, a power of two >= 16.
      num_warps: warps of 32 threads in a program, a power of two.
      num_stages: how many blocks of the inner loop's operands are in flight at a time.
    """

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        for name, least, most in (
            ("block_q", SMALLEST, 1024),
            ("block_k", SMALLEST, 1024),
            ("num_warps", 1, 32),
        ):
            size = getattr(self, name)
            if type(size) is not int or not least <= size <= most or size & (size - 1):
                raise ValueError(
                    f"{name}: expected a power of two, {least} to {most}, got {size!r}"
                )
        if type(self.num_stages) is not int or not 1 <= self.num_stages <= 8:
            raise ValueError(f"num_stages: expected an int, 1 to 8, got {self.num_stages!r}")

    def query_blocks(self, dims: Dims) -> int:
        """How many there are in one head of one batch row."""
        return -(-dims.query_length // self.block_q)

    def key_blocks(self, dims: Dims) -> int:
        """Likewise."""
        return -(-dims.key_length // self.block_k)

    def fitted(self, query_length: int, key_length: int) -> "Config":
        """With blocks no larger than short lengths need."""
        return Config(
            min(self.block_q, max(SMALLEST, _power_of_two(query_length))),
            min(self.block_k, max(SMALLEST, _power_of_two(key_length))),
            self.num_warps,
            self.num_stages,
        )


@dataclass(frozen=True)
class Configs:
    """Of the kernels of attention.

    Attributes:
      forward: of the forward.
      key_gradient: of the kernel for dk, and for dv where that has none of its own.
      query_gradient: of the kernel for dq.
      value_gradient: of a kernel for dv alone. Two sums of wide rows do not fit in registers.
    """

    forward: Config
    key_gradient: Config
    query_gradient: Config
    value_gradient: Config | None = None


def largest_head_dim(dtype: jnp.dtype, compute_capability: str | None) -> int:
    """Beyond, a tile of the least sides is too large for a program's shared memory."""
    return 256 if dtype == jnp.float32 and _shared_memory(compute_capability) < 227 else 512


def _shared_memory(compute_capability: str | None) -> int:
    return _SHARED_MEMORY.get(str(compute_capability), _LEAST_SHARED_MEMORY)


class Products(enum.Enum):
    """What multiplies, on which registers and shared memory hang."""

    HALF = "16-bit operands on tensor cores"
    SINGLE = "float32 operands on tensor cores, rounded to TF32 or bfloat16"
    EXACT = "float32 operands as float32, or as several rounded ones each"

    @classmethod
    def of(cls, dtype: jnp.dtype, precision: Precision) -> "Products":
        if dtype != jnp.float32:
            return cls.HALF
        return cls.SINGLE if precision in _ROUNDED else cls.EXACT


_ROUNDED = (
    jax.lax.Precision.DEFAULT,
    jax.lax.Precision.HIGH,
    jax.lax.DotAlgorithmPreset.DEFAULT,
    jax.lax.DotAlgorithmPreset.TF32_TF32_F32,
    jax.lax.DotAlgorithmPreset.BF16_BF16_F32,
)


def pick(
    dims: Dims, dtype: jnp.dtype, precision: Precision, compute_capability: str | None
) -> Configs:
    """The configs for a call.

    Args:
      dims: its sizes.
      dtype: of query, key and value.
      precision: of products of float32 operands.
      compute_capability: of the device, such as "9.0"; None for no GPU.
    """
    width = max(sum(widths(dims.head_dim)), sum(widths(dims.value_head_dim)))
    call = (width, Products.of(dtype, precision), compute_capability)
    lengths = (dims.query_length, dims.key_length)
    of_value = value_gradient(*call)
    return Configs(
        forward(*call).fitted(*lengths),
        key_gradient(*call).fitted(*lengths),
        query_gradient(*call).fitted(*lengths),
        None if of_value is None else of_value.fitted(*lengths),
    )


def forward(width: int, products: Products, compute_capability: str | None) -> Config:
    """For rows of `width` entries, as are the next three.

    On an H200, in ms in bfloat16 at B 2, S 8192, causal, with 32 heads of 64 entries, 16 of 80 to
    128 or 8 of 192 and 256, this beside the next best:
    width 64: 1.32, 128x64/4/4 1.34 (2.63 and 2.60 without causality)
    width 96, 80: 0.87, 0.78; 256x64/8/3 0.99, 1.02
    width 128: 1.06, 256x64/8/3 1.05 (2.02 and 2.03 without causality; 0.54 and 0.58 at S 4096, 32
    heads on 8)
    width 192: 0.88, 128x32/8/3 0.99
    width 256: 1.07, 128x32/8/3 1.19
    """
    room = _shared_memory(compute_capability)
    if products is Products.EXACT:
        return Config(32, 32, 8, 1) if width <= 256 else Config(16, 16, 8, 1)
    if products is Products.SINGLE:
        if width <= 128:
            return Config(64, 32, 4, 2)
        if width <= 256:
            return Config(32, 32, 4, 2) if room > 99 else Config(32, 32, 8, 1)
        return Config(16, 16, 8, 1)
    if width > 256:
        return Config(64, 32, 8, 1) if room > 163 else Config(16, 32, 8, 1)
    if compute_capability == "9.0":
        if width <= 128:
            return Config(128, 64, 4, 3 if width < 128 else 2)
        return Config(128, 64, 8, 3 if width < 256 else 2)
    if width <= 64:
        return Config(128, 64, 8, 3)
    if width <= 128:
        return Config(128, 64, 4, 2)
    return Config(128, 64, 8, 2) if room > 99 else Config(64, 32, 4, 2)


def key_gradient(width: int, products: Products, compute_capability: str | None) -> Config:
    """As above, of dk and dv together, beside the next best:
    width 64: 2.37, 32x128/4/3 2.49
    width 96, 80: 1.71, 1.56; 64x64/4/2 1.81, -
    width 128: 2.07, 64x128/8/3 2.12 (3.91 and 3.95 without causality)
    width 192: 2.63, 64x64/8/2 3.05
    width 256: 3.16 in two kernels, 7.25 in one at 64x32/8/2
    """
    room = _shared_memory(compute_capability)
    if products is Products.EXACT:
        if width <= 128:
            return Config(32, 32, 8, 1)
        return Config(16, 16, 4, 1) if width <= 256 else Config(16, 16, 8, 1)
    if products is Products.SINGLE:
        if width <= 64:
            return Config(64, 32, 4, 2)
        if width <= 128:
            return Config(32, 16, 4, 2)
        if width <= 256:
            return Config(32, 16, 4, 1) if room > 99 else Config(16, 16, 8, 1)
        return Config(16, 16, 8, 1)
    if width > 256:
        return Config(16, 16, 4, 1)
    if compute_capability == "9.0":
        if width <= 128:
            return Config(64, 64, 4, 3 if width < 128 else 2)
        return Config(64, 128, 8, 2) if width < 256 else Config(32, 128, 8, 2)
    if width <= 64:
        return Config(64, 64, 4, 2)
    if width <= 128:
        return Config(64, 64, 8, 2) if room > 163 else Config(64, 64, 4, 2)
    return Config(64, 32, 8, 2) if room > 99 else Config(32, 32, 4, 2)


def value_gradient(width: int, products: Products, compute_capability: str | None) -> Config | None:
    """Of dv alone, where one program has no registers for two sums; see `key_gradient`."""
    if products is Products.HALF and width == 256 and compute_capability == "9.0":
        return Config(64, 128, 8, 2)
    return None


def query_gradient(width: int, products: Products, compute_capability: str | None) -> Config:
    """As above, beside the next best:
    width 64: 1.46, 64x64/4/3 1.69
    width 96, 80: 1.28, 1.19; 128x64/8/3 1.59, 128x64/4/2 1.25
    width 128: 1.52, 128x64/8/3 1.60 (3.01 and 3.03 without causality)
    width 192: 1.40, 128x64/8/2 1.49
    width 256: 2.14, 64x64/4/2 2.24
    """
    room = _shared_memory(compute_capability)
    if products is Products.EXACT:
        if width <= 128:
            return Config(32, 32, 8, 1)
        if width <= 256:
            return Config(32, 32, 8, 1) if room > 99 else Config(16, 16, 4, 1)
        return Config(16, 16, 8, 1)
    if products is Products.SINGLE:
        if width <= 64:
            return Config(64, 32, 4, 2)
        if width <= 128:
            return Config(32, 32, 4, 2)
        if width <= 256:
            return Config(32, 16, 4, 1) if room > 99 else Config(16, 16, 4, 1)
        return Config(16, 16, 8, 1)
    if width > 256:
        return Config(16, 16, 4, 1)
    if compute_capability == "9.0":
        if width <= 64:
            return Config(128, 64, 4, 3)
        if width <= 128:
            return Config(64, 64, 4, 3) if width < 128 else Config(128, 64, 8, 4)
        return Config(64, 64, 4, 3) if width < 256 else Config(128, 32, 8, 2)
    if width <= 64:
        return Config(128, 64, 8, 2)
    if width <= 128:
        if room > 163:
            return Config(128, 64, 8, 3)
        return Config(128, 64, 8, 2) if room > 99 else Config(64, 64, 4, 2)
    return Config(64, 32, 8, 2) if room > 99 else Config(32, 32, 4, 2)


def pieces(head_dim: int) -> tuple[tuple[int, int], ...]:
    """(start, width) of the powers of two that cover a head dim; the last may reach beyond.

    Arrays in a kernel have sides that are powers of two. Two of them hold 96 as 64 + 32 and do
    three quarters of the work that 128 would.
    """
    whole = 1 << (head_dim.bit_length() - 1)
    rest = head_dim - whole
    if whole < SMALLEST:
        return ((0, SMALLEST),)
    if rest == 0:
        return ((0, whole),)
    width = max(SMALLEST, _power_of_two(rest))
    return ((0, 2 * whole),) if width == whole else ((0, whole), (whole, width))


def widths(head_dim: int) -> tuple[int, ...]:
    """Of the `pieces`."""
    return tuple(width for _, width in pieces(head_dim))


def _power_of_two(length: int) -> int:
    """The least that is not below."""
    return 1 << max(0, length - 1).bit_length()
