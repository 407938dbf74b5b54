"""How each kernel is cut into blocks and compiled, and what is picked for a call.

The picks keep every kernel within the shared memory of the smallest card of its compute capability,
less a tenth for another compiler; a test compiles them and holds that. Those for compute capability
9.0 were measured, on an H200; the others rest on that and on what the compiler says (shared memory,
spills).
"""

import enum
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_flash.spec import AttentionSpec, Dims, Precision

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
            min(self.block_q, max(SMALLEST, power_of_two(query_length))),
            min(self.block_k, max(SMALLEST, power_of_two(key_length))),
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


class _Rule(NamedTuple):
    """A config, and the calls that it is for."""

    width: int  # rows of up to so many entries
    config: Config
    capability: str | None = None  # this compute capability alone
    room: int = 0  # so many KiB of shared memory at least
    is_capped: bool = False  # with a soft cap only


# The first rule that holds is taken.
_Rules = dict[Products, tuple[_Rule, ...]]

# Above each rule for compute capability 9.0, and for exact products, is what it takes on an H200 in
# ms, causal, beside the next best. 16-bit ones: in bfloat16 at B 2, S 8192 with 32 heads of 64
# entries, 16 of 80 to 128 or 8 of 192 and 256; rows of 512 at B 1, S 2048 with 4 heads. float32: at
# B 1, S 4096 with 16 heads of 64 or 128 entries or 8 of 256.

_FORWARD: _Rules = {
    Products.HALF: (
        # 1.32, 128x64/4/4 1.34 (2.63 and 2.60 without causality)
        _Rule(64, Config(128, 64, 4, 3), "9.0"),
        # width 80: 0.78, 256x64/8/3 1.02; 96: 0.87, the same 0.99
        _Rule(96, Config(128, 64, 4, 3), "9.0"),
        # 1.28, 128x64/4/2 1.40
        _Rule(128, Config(128, 32, 4, 3), "9.0", is_capped=True),
        # 1.06, 256x64/8/3 1.05 (2.02 and 2.03 without causality; at S 4096, 32 heads on 8, 0.54
        # and 0.58)
        _Rule(128, Config(128, 64, 4, 2), "9.0"),
        # 0.88, 128x32/8/3 0.99
        _Rule(192, Config(128, 64, 8, 3), "9.0"),
        # 1.07, 128x32/8/3 1.19
        _Rule(256, Config(128, 64, 8, 2), "9.0"),
        _Rule(64, Config(128, 64, 8, 3)),
        _Rule(128, Config(128, 64, 4, 2)),
        _Rule(256, Config(128, 64, 8, 2), room=163),
        _Rule(256, Config(64, 32, 4, 2)),
        # 0.13, 32x64/8/1 0.15
        _Rule(512, Config(16, 32, 4, 2)),
    ),
    Products.SINGLE: (
        # 0.26, 128x64/4/1 0.27
        _Rule(64, Config(128, 64, 4, 2), "9.0"),
        # 0.68, 128x32/4/2 0.83
        _Rule(128, Config(32, 64, 4, 2), "9.0"),
        # 0.78, 16x32/4/2 1.12
        _Rule(256, Config(32, 32, 4, 2), "9.0"),
        _Rule(128, Config(64, 32, 4, 2)),
        _Rule(256, Config(32, 32, 4, 2), room=163),
        _Rule(256, Config(32, 32, 8, 1)),
        _Rule(512, Config(16, 16, 8, 1)),
    ),
    Products.EXACT: (
        # 3.1, 64x64/4/1 2.8 (which spills 66 KB by another version of the compiler)
        _Rule(64, Config(32, 32, 4, 1)),
        # 7.0, 32x64/8/1 7.3
        _Rule(128, Config(16, 64, 4, 1)),
        # 10.3, 16x32/4/1 10.5
        _Rule(256, Config(32, 32, 8, 1)),
        _Rule(512, Config(16, 16, 8, 1)),
    ),
}

# Of dk and dv together.
_KEY_GRADIENT: _Rules = {
    Products.HALF: (
        # 2.37, 32x128/4/3 2.49
        _Rule(64, Config(64, 64, 4, 3), "9.0"),
        # width 80: 1.56; 96: 1.71, 64x64/4/2 1.81
        _Rule(96, Config(64, 64, 4, 3), "9.0"),
        # 2.07, 64x128/8/3 2.12 (3.91 and 3.95 without causality)
        _Rule(128, Config(64, 64, 4, 2), "9.0"),
        # 2.63, 64x64/8/2 3.05
        _Rule(192, Config(64, 128, 8, 2), "9.0"),
        # dk alone: with the kernel for dv 3.16, in one 7.25 at 64x32/8/2
        _Rule(256, Config(32, 128, 8, 2), "9.0"),
        # 0.32, 16x16/4/1 0.43
        _Rule(512, Config(32, 32, 8, 1), "9.0"),
        _Rule(64, Config(64, 64, 4, 2)),
        _Rule(128, Config(64, 64, 8, 2), room=227),
        _Rule(128, Config(64, 64, 4, 2)),
        _Rule(256, Config(64, 32, 8, 2), room=163),
        _Rule(256, Config(32, 32, 4, 2)),
        _Rule(512, Config(16, 16, 4, 1)),
    ),
    Products.SINGLE: (
        # 0.62, 64x64/4/2 0.70
        _Rule(64, Config(64, 128, 8, 2), "9.0"),
        # 1.75, 32x32/4/2 1.80
        _Rule(128, Config(32, 32, 4, 1), "9.0"),
        # 2.49, 64x32/8/2 2.34 (which does not fit by another version of the compiler)
        _Rule(256, Config(32, 32, 4, 2), "9.0"),
        _Rule(64, Config(64, 32, 4, 2)),
        _Rule(128, Config(32, 16, 4, 2)),
        _Rule(256, Config(32, 16, 4, 1), room=163),
        _Rule(512, Config(16, 16, 8, 1)),
    ),
    Products.EXACT: (
        # 5.7, 32x64/8/1 5.8
        _Rule(64, Config(32, 32, 4, 1)),
        # 12.3, 32x64/8/1 11.5 (which does not fit on the smallest card)
        _Rule(128, Config(16, 64, 4, 1)),
        # 20.8, 32x32/8/1 20.0 (likewise)
        _Rule(256, Config(16, 16, 4, 1)),
        _Rule(512, Config(16, 16, 8, 1)),
    ),
}

# Of dv alone, where the two do not fit in one program: see `pick`.
_VALUE_GRADIENT = Config(64, 128, 8, 2)

_QUERY_GRADIENT: _Rules = {
    Products.HALF: (
        # 1.46, 64x64/4/3 1.69
        _Rule(64, Config(128, 64, 4, 3), "9.0"),
        # width 80: 1.19, 128x64/4/2 1.25; 96: 1.28, 128x64/8/3 1.59
        _Rule(96, Config(64, 64, 4, 3), "9.0"),
        # 1.52, 128x64/8/3 1.60 (3.01 and 3.03 without causality)
        _Rule(128, Config(128, 64, 8, 4), "9.0"),
        # 1.40, 128x64/8/2 1.49
        _Rule(192, Config(64, 64, 4, 3), "9.0"),
        # 2.14, 64x64/4/2 2.24
        _Rule(256, Config(128, 32, 8, 2), "9.0"),
        # 0.18, 32x64/8/1 0.21
        _Rule(512, Config(16, 32, 4, 2), "9.0"),
        _Rule(64, Config(128, 64, 8, 2)),
        _Rule(128, Config(128, 64, 8, 3), room=227),
        _Rule(128, Config(128, 64, 8, 2), room=163),
        _Rule(128, Config(64, 64, 4, 2)),
        _Rule(256, Config(64, 32, 8, 2), room=163),
        _Rule(256, Config(32, 32, 4, 2)),
        _Rule(512, Config(16, 16, 4, 1)),
    ),
    Products.SINGLE: (
        # 0.35, 128x128/8/2 0.38
        _Rule(64, Config(128, 32, 4, 3), "9.0"),
        # 1.04, 32x64/4/2 1.09
        _Rule(128, Config(128, 32, 8, 1), "9.0"),
        # 1.64, 32x64/8/1 1.77
        _Rule(256, Config(32, 32, 4, 1), "9.0"),
        _Rule(64, Config(64, 32, 4, 2)),
        _Rule(128, Config(32, 32, 4, 2)),
        _Rule(256, Config(32, 16, 4, 1), room=163),
        _Rule(256, Config(16, 16, 4, 1)),
        _Rule(512, Config(16, 16, 8, 1)),
    ),
    Products.EXACT: (
        # 5.3, 64x64/4/1 5.0 (which spills 4 KB)
        _Rule(64, Config(32, 32, 4, 1)),
        # 12.4, 32x32/4/2 12.1 (which spills)
        _Rule(128, Config(16, 64, 4, 1)),
        # 19.1, 16x64/8/1 19.6
        _Rule(256, Config(32, 32, 8, 1), room=163),
        _Rule(256, Config(16, 16, 4, 1)),
        _Rule(512, Config(16, 16, 8, 1)),
    ),
}


def pick(
    spec: AttentionSpec, dims: Dims, dtype: jnp.dtype, compute_capability: str | None
) -> Configs:
    """The configs for a call.

    Args:
      spec: its static half.
      dims: its sizes.
      dtype: of query, key and value.
      compute_capability: of the device, such as "9.0"; None for no GPU.
    """
    width = max(sum(widths(dims.head_dim)), sum(widths(dims.value_head_dim)))
    products = Products.of(dtype, spec.precision)
    lengths = (dims.query_length, dims.key_length)
    room = _shared_memory(compute_capability)

    def of(rules: _Rules) -> Config:
        config = next(
            rule.config
            for rule in rules[products]
            if width <= rule.width
            and rule.capability in (None, compute_capability)
            and rule.room <= room
            and not (rule.is_capped and spec.logits_soft_cap is None)
        )
        return config.fitted(*lengths)

    # One program has no registers for the sums of both dk and dv.
    is_split = products is Products.HALF and width == 256 and compute_capability == "9.0"
    return Configs(
        forward=of(_FORWARD),
        key_gradient=of(_KEY_GRADIENT),
        query_gradient=of(_QUERY_GRADIENT),
        value_gradient=_VALUE_GRADIENT.fitted(*lengths) if is_split else None,
    )


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
    width = max(SMALLEST, power_of_two(rest))
    return ((0, 2 * whole),) if width == whole else ((0, whole), (whole, width))


def widths(head_dim: int) -> tuple[int, ...]:
    """Of the `pieces`."""
    return tuple(width for _, width in pieces(head_dim))


def power_of_two(length: int) -> int:
    """The least that is not below."""
    return 1 << max(0, length - 1).bit_length()
