"""Pallas kernels lowered through Triton, for NVIDIA GPUs of compute capability 8.0 and later."""

import importlib
import importlib.util
from dataclasses import dataclass

import jax

from pallas_flash.backends import Device, missing_product
from pallas_flash.backends.triton import config
from pallas_flash.spec import AttentionSpec, Dims, ForwardOutput, Operands, Residuals

_LARGEST_HEAD_DIM = 256

# What no kernel here reads yet, by the names that a caller gives them.
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
      configs: of the kernels; None picks them for each call.
    """

    interpret: bool = False
    configs: config.Configs | None = None

    @property
    def name(self) -> str:
        return "interpret" if self.interpret else "triton"

    def unsupported_reasons(
        self, spec: AttentionSpec, operands: Operands, device: Device
    ) -> tuple[str, ...]:
        """Why this backend cannot run the call."""
        reasons = []
        if importlib.util.find_spec("jax.experimental.pallas.triton") is None:
            reasons.append(f"JAX {jax.__version__} has no Triton lowering of Pallas")
        if self.interpret:
            reasons.extend(missing_product(spec, operands, device))
        else:
            reasons.append("its kernels have not been run on a GPU yet")
        if not self.interpret and (
            device.compute_capability is None or float(device.compute_capability) < 8.0
        ):
            reasons.append(
                f"it needs an NVIDIA GPU of compute capability 8.0 or later, not {device}"
            )
        reasons.extend(
            f"the kernels do not read {what} yet"
            for name, what in _UNREAD.items()
            if getattr(operands, name) is not None
        )
        dims = Dims.of(operands)
        for name, size in (("H", dims.head_dim), ("Hv", dims.value_head_dim)):
            if not 1 <= size <= _LARGEST_HEAD_DIM:
                reasons.append(f"a head dim is from 1 to {_LARGEST_HEAD_DIM}, and {name} = {size}")
        return tuple(reasons)

    def forward(
        self, spec: AttentionSpec, operands: Operands, *, with_statistics: bool
    ) -> ForwardOutput:
        """Attention and its lse, and where asked for the statistics that the backward needs."""
        kernels = importlib.import_module("pallas_flash.backends.triton.forward")
        configs = self._configs(operands)
        return kernels.forward(spec, configs.forward, self.interpret, with_statistics, operands)

    def backward(
        self, spec: AttentionSpec, residuals: Residuals, dout: jax.Array, dlse: jax.Array
    ) -> Operands:
        """The gradient of each float operand; None for the others."""
        kernels = importlib.import_module("pallas_flash.backends.triton.backward")
        configs = self._configs(residuals.operands)
        return kernels.backward(
            spec,
            configs.key_gradient,
            configs.query_gradient,
            self.interpret,
            residuals,
            dout,
            dlse,
        )

    def _configs(self, operands: Operands) -> config.Configs:
        if self.configs is not None:
            return self.configs
        return config.Configs(*(config.Config(32, 32, 4, 2),) * 3)
