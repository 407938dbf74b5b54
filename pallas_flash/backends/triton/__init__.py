"""Pallas kernels lowered through Triton."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_flash.backends import Device
from pallas_flash.spec import AttentionSpec, Dims, ForwardOutput, Operands, Residuals

_NOT_WRITTEN = "not written yet"


@dataclass(frozen=True)
class TritonBackend:
    """Attention by Triton kernels.

    Attributes:
      interpret: run the kernels in Pallas's interpreter, on any platform.
    """

    interpret: bool = False

    @property
    def name(self) -> str:
        return "interpret" if self.interpret else "triton"

    def unsupported_reasons(
        self, spec: AttentionSpec, dims: Dims, dtype: jnp.dtype, device: Device
    ) -> tuple[str, ...]:
        """Why this backend cannot run the call."""
        return (_NOT_WRITTEN,)

    def forward(self, spec: AttentionSpec, operands: Operands) -> ForwardOutput:
        """Attention and its lse."""
        raise NotImplementedError(_NOT_WRITTEN)

    def backward(
        self, spec: AttentionSpec, residuals: Residuals, dout: jax.Array, dlse: jax.Array
    ) -> Operands:
        """The gradient of each float operand."""
        raise NotImplementedError(_NOT_WRITTEN)
