"""Blockwise attention in plain JAX: linear memory forward and backward, on any platform."""

from dataclasses import dataclass

import jax

from pallas_flash.backends import Device, missing_product
from pallas_flash.backends.xla.backward import backward
from pallas_flash.backends.xla.decode import decode
from pallas_flash.backends.xla.forward import forward
from pallas_flash.spec import (
    AnyOperands,
    AttentionSpec,
    DecodeOperands,
    ForwardOutput,
    Operands,
    Residuals,
)


@dataclass(frozen=True)
class XlaBackend:
    """Attention by XLA alone.

    Attributes:
      block_q: queries in a block.
      block_k: keys in a block.
    """

    block_q: int = 256
    block_k: int = 256

    def __post_init__(self) -> None:
        for field in ("block_q", "block_k"):
            size = getattr(self, field)
            if type(size) is not int or size < 1:
                raise ValueError(f"{field}: expected an int >= 1, got {size!r}")

    @property
    def name(self) -> str:
        return "xla"

    def unsupported_reasons(
        self, spec: AttentionSpec, operands: AnyOperands, device: Device
    ) -> tuple[str, ...]:
        """Why this backend cannot run the call."""
        return missing_product(spec, operands, device)

    def forward(
        self, spec: AttentionSpec, operands: Operands, *, with_lse: bool, with_statistics: bool
    ) -> ForwardOutput:
        """Attention, and where asked for its lse and the statistics that the backward needs."""
        result = forward(spec, (self.block_q, self.block_k), operands)
        # XLA computes none of what is not used.
        unused = [] if with_lse else ["lse"]
        unused += [] if with_statistics else ["m", "log_l"]
        return result._replace(**dict.fromkeys(unused))

    def backward(
        self, spec: AttentionSpec, residuals: Residuals, dout: jax.Array, dlse: jax.Array | None
    ) -> Operands:
        """The gradient of each float operand; None for the others."""
        return backward(spec, (self.block_q, self.block_k), residuals, dout, dlse)

    def decode(
        self, spec: AttentionSpec, operands: DecodeOperands, *, with_lse: bool
    ) -> ForwardOutput:
        """Attention of new tokens over a cache, and where asked for its lse."""
        result = decode(spec, (self.block_q, self.block_k), operands)
        return result if with_lse else result._replace(lse=None)
