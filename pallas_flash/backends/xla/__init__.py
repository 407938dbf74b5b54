"""Blockwise attention in plain JAX: linear memory forward and backward, on any platform."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_flash.backends import Device
from pallas_flash.backends.xla.backward import backward
from pallas_flash.backends.xla.forward import forward
from pallas_flash.spec import AttentionSpec, Dims, ForwardOutput, Operands, Residuals

# All that JAX 0.10 to 0.12 lowers for a CPU, of those that sum in float32.
_CPU_ALGORITHMS = (
    jax.lax.DotAlgorithmPreset.DEFAULT,
    jax.lax.DotAlgorithmPreset.F32_F32_F32,
    jax.lax.DotAlgorithmPreset.BF16_BF16_F32,
    jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3,
    jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6,
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
        self, spec: AttentionSpec, dims: Dims, dtype: jnp.dtype, device: Device
    ) -> tuple[str, ...]:
        """Why this backend cannot run the call."""
        precision = spec.precision
        is_algorithm = isinstance(precision, jax.lax.DotAlgorithmPreset)
        if (
            is_algorithm
            and device.platform == "cpu"
            and dtype == jnp.float32
            and precision not in _CPU_ALGORITHMS
        ):
            return (f"JAX has no product of precision {precision} on a CPU",)
        return ()

    def forward(self, spec: AttentionSpec, operands: Operands) -> ForwardOutput:
        """Attention and its lse."""
        return forward(spec, (self.block_q, self.block_k), operands)

    def backward(
        self, spec: AttentionSpec, residuals: Residuals, dout: jax.Array, dlse: jax.Array
    ) -> Operands:
        """The gradient of each float operand; None for the others."""
        return backward(spec, (self.block_q, self.block_k), residuals, dout, dlse)
