"""Block sizes, warps and stages of each kernel, and which are picked for a call."""

from dataclasses import dataclass, fields

# What a tensor core's product needs of each side of a tile.
SMALLEST = 16


@dataclass(frozen=True)
class Config:
    """How one kernel is cut and compiled.

    Attributes:
      block_q: queries in a tile, a power of two >= 16.
      block_k: keys in a tile, a power of two >= 16.
      num_warps: warps of 32 threads in a program.
      num_stages: how many blocks of the inner loop's operands are in flight at a time.
    """

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        least = {"block_q": SMALLEST, "block_k": SMALLEST, "num_warps": 1, "num_stages": 1}
        for field in fields(self):
            size = getattr(self, field.name)
            is_power_of_two = type(size) is int and size > 0 and size & (size - 1) == 0
            if field.name == "num_stages":
                if type(size) is not int or not 1 <= size <= 8:
                    raise ValueError(f"num_stages: expected an int from 1 to 8, got {size!r}")
            elif not is_power_of_two or size < least[field.name]:
                raise ValueError(
                    f"{field.name}: expected a power of two >= {least[field.name]}, got {size!r}"
                )


@dataclass(frozen=True)
class Configs:
    """Of the three kernels of attention.

    Attributes:
      forward: of the forward.
      key_gradient: of the kernel for dk and dv.
      query_gradient: of the kernel for dq.
    """

    forward: Config
    key_gradient: Config
    query_gradient: Config
