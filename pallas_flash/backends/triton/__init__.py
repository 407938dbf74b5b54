"""Pallas kernels lowered through Triton, for NVIDIA GPUs of compute capability 8.0 and later."""

import importlib
import importlib.util
from dataclasses import dataclass

import jax

from pallas_flash.backends import Device, missing_product
from pallas_flash.backends.triton import config
from pallas_flash.backends.triton.decode_config import DecodeConfig, pick_decode
from pallas_flash.spec import (
    AnyOperands,
    AttentionSpec,
    DecodeOperands,
    Dims,
    ForwardOutput,
    Operands,
    Residuals,
)

# What the kernels of attention do not read yet, by the names that a caller gives them.
_UNREAD = {
    "bias": "a bias",
    "mask": "a mask array",
    "query_segment_ids": "segment ids",
    "sinks": "sinks",
}


@dataclass(frozen=True)
class TritonBackend:
    """Attention by Triton kernels.

    Attributes:
      interpret: run the kernels in Pallas's interpreter, on any platform.
      configs: of the kernels of attention; None picks them for each call.
      decode_config: of those that decode, likewise.
    """

    interpret: bool = False
    configs: config.Configs | None = None
    decode_config: DecodeConfig | None = None

    @property
    def name(self) -> str:
        return "interpret" if self.interpret else "triton"

    def unsupported_reasons(
        self, spec: AttentionSpec, operands: AnyOperands, device: Device
    ) -> tuple[str, ...]:
        """Why this backend cannot run the call."""
        reasons = []
        capability = device.compute_capability
        if importlib.util.find_spec("jax.experimental.pallas.triton") is None:
            reasons.append(f"JAX {jax.__version__} has no Triton lowering of Pallas")
        if self.interpret:
            reasons.extend(missing_product(spec, operands, device))
        elif capability is None or float(capability) < 8.0:
            needed = "an NVIDIA GPU of compute capability 8.0 or later"
            reasons.append(f"the kernels need {needed}, not {device}")
        reasons.extend(
            f"the kernels do not read {what} yet"
            for name, what in _UNREAD.items()
            if isinstance(operands, Operands) and getattr(operands, name) is not None
        )
        dims = Dims.of(operands)
        dtype = operands.query.dtype
        # The interpreter has no shared memory to run out of.
        most = 512 if self.interpret else config.largest_head_dim(dtype, capability)
        reasons.extend(
            f"head dims of {dtype} are from 1 to {most} here, and {name} = {size}"
            for name, size in (("H", dims.head_dim), ("Hv", dims.value_head_dim))
            if not 1 <= size <= most
        )
        return tuple(reasons)

    def forward(
        self, spec: AttentionSpec, operands: Operands, *, with_lse: bool, with_statistics: bool
    ) -> ForwardOutput:
        """Attention, and where asked for its lse and the statistics that the backward needs."""
        kernels = importlib.import_module("pallas_flash.backends.triton.forward")
        configs = self._configs(spec, operands)
        return kernels.forward(
            spec, configs.forward, self.interpret, with_lse, with_statistics, operands
        )

    def backward(
        self, spec: AttentionSpec, residuals: Residuals, dout: jax.Array, dlse: jax.Array | None
    ) -> Operands:
        """The gradient of each float operand; None for the others."""
        kernels = importlib.import_module("pallas_flash.backends.triton.backward")
        configs = self._configs(spec, residuals.operands)
        return kernels.backward(spec, configs, self.interpret, residuals, dout, dlse)

    def decode(
        self, spec: AttentionSpec, operands: DecodeOperands, *, with_lse: bool
    ) -> ForwardOutput:
        """Attention of new tokens over a cache, and where asked for its lse."""
        kernels = importlib.import_module("pallas_flash.backends.triton.decode")
        cut = self.decode_config
        if cut is None:
            multiprocessors = Device.of(operands.query).multiprocessors
            dims, dtype = Dims.of(operands), operands.query.dtype
            cut = pick_decode(spec, dims, dtype, multiprocessors)
        return kernels.decode(spec, cut, self.interpret, with_lse, operands)

    def _configs(self, spec: AttentionSpec, operands: Operands) -> config.Configs:
        if self.configs is not None:
            return self.configs
        capability = Device.of(operands.query).compute_capability
        return config.pick(spec, Dims.of(operands), operands.query.dtype, capability)
