"""What can compute attention, and which of it does.

A backend is a frozen, hashable value. It is loaded when it is first asked for, by name, so that
importing the package loads no kernel.
"""

import importlib
import re
from dataclasses import dataclass, fields
from typing import Protocol, Self, runtime_checkable

import jax
import jax.export
import jax.numpy as jnp

from pallas_flash.spec import (
    AnyOperands,
    AttentionSpec,
    DecodeOperands,
    ForwardOutput,
    Operands,
    Residuals,
)


@dataclass(frozen=True)
class Device:
    """Where a call will run.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      kind: the maker's name of it, such as "NVIDIA H200".
      compute_capability: of an NVIDIA GPU, such as "9.0"; None elsewhere.
      multiprocessors: of a GPU, how many it has; None where that is not known.
    """

    platform: str
    kind: str
    compute_capability: str | None = None
    multiprocessors: int | None = None

    @classmethod
    def of(cls, x: jax.Array) -> Self:
        """Where `x` lives; for what lives nowhere yet, where JAX runs things by default.

        Under `jax.sharding.use_abstract_mesh` with an abstract NVIDIA GPU, for which a call can be
        lowered where there is none, it is that one.
        """
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
            device = min(x.devices(), key=lambda device: device.id)
        else:
            # pyrefly: ignore[missing-attribute]  # JAX makes its options attributes at run time.
            default = jax.config.jax_default_device
            device = jax.devices(default)[0] if isinstance(default, str | None) else default
            # JAX 0.10 has no such thing.
            target = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
            # On a mesh of what is here it is but a likeness of it.
            if target is not None and target.device_kind != device.device_kind:
                triton = importlib.import_module("jax.experimental.pallas.triton")
                capability = triton.get_gpu_info().arch_name
                return cls("gpu", target.device_kind, capability, target.num_cores)
        # An AMD GPU has one too, such as "gfx942".
        capability = getattr(device, "compute_capability", None)
        is_number = capability is not None and re.fullmatch(r"\d+\.\d+", capability)
        return cls(
            device.platform,
            device.device_kind,
            capability if is_number else None,
            getattr(device, "core_count", None),
        )

    def __str__(self) -> str:
        return f"{self.platform} ({self.kind})"


@runtime_checkable
class Backend(Protocol):
    """One way to compute attention. Layouts, padding and blocks are its own affair."""

    @property
    def name(self) -> str:
        """As in the argument `implementation`."""
        ...

    def unsupported_reasons(
        self, spec: AttentionSpec, operands: AnyOperands, device: Device
    ) -> tuple[str, ...]:
        """Why it cannot run such a call, a sentence each; empty where it can."""
        ...

    def forward(
        self, spec: AttentionSpec, operands: Operands, *, with_lse: bool, with_statistics: bool
    ) -> ForwardOutput:
        """Attention, and where asked for its lse and the statistics that the backward needs."""
        ...

    def backward(
        self, spec: AttentionSpec, residuals: Residuals, dout: jax.Array, dlse: jax.Array | None
    ) -> Operands:
        """The gradient of every float operand that is not None, in its dtype; None for the rest."""
        ...

    def decode(
        self, spec: AttentionSpec, operands: DecodeOperands, *, with_lse: bool
    ) -> ForwardOutput:
        """Attention of new tokens over a cache, and where asked for its lse; no statistics."""
        ...


# All that JAX 0.10 to 0.12 lowers for a CPU, of the algorithms that sum in float32.
_CPU_ALGORITHMS = (
    jax.lax.DotAlgorithmPreset.DEFAULT,
    jax.lax.DotAlgorithmPreset.F32_F32_F32,
    jax.lax.DotAlgorithmPreset.BF16_BF16_F32,
    jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3,
    jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6,
)


def missing_product(spec: AttentionSpec, operands: AnyOperands, device: Device) -> tuple[str, ...]:
    """A reason not to run where XLA has no product of the precision asked for; else empty."""
    precision = spec.precision
    is_known = (
        not isinstance(precision, jax.lax.DotAlgorithmPreset)
        or operands.query.dtype != jnp.float32
        or device.platform != "cpu"
        or precision in _CPU_ALGORITHMS
    )
    return () if is_known else (f"JAX has no product of precision {precision} on a CPU",)


IMPLEMENTATIONS = ("triton", "interpret", "xla")

# What `jax.export.export(..., disabled_checks=)` must be told before it takes a call that a kernel
# runs: Pallas has no form of it that it promises to keep.
DISABLED_EXPORT_CHECKS = (jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton"),)

# In order of speed where they run. The interpreter is for tests: it runs when it is named.
_CANDIDATES = ("triton", "xla")


def load(name: str) -> Backend:
    """The backend of that name, of `IMPLEMENTATIONS`."""
    if name == "xla":
        return importlib.import_module("pallas_flash.backends.xla").XlaBackend()
    triton = importlib.import_module("pallas_flash.backends.triton")
    return triton.TritonBackend(interpret=name == "interpret")


def require_known(implementation: str | Backend | None) -> None:
    """ValueError unless it is None, one of `IMPLEMENTATIONS` or a backend; loads nothing."""
    is_name = isinstance(implementation, str) and implementation in IMPLEMENTATIONS
    is_backend = isinstance(implementation, Backend) and not isinstance(implementation, type)
    if implementation is not None and not is_name and not is_backend:
        known = ", ".join(repr(name) for name in IMPLEMENTATIONS)
        raise ValueError(
            f"implementation: expected None, one of {known}, or a backend, got {implementation!r}"
        )


def select(
    implementation: str | Backend | None,
    spec: AttentionSpec,
    operands: AnyOperands,
) -> Backend:
    """The backend that runs the call: the one named, or else the first candidate that can.

    Raises:
      ValueError: no backend has that name.
      NotImplementedError: it, or where none is named every candidate, has reasons not to run it.
    """
    require_known(implementation)
    if implementation is None:
        candidates = [load(name) for name in _CANDIDATES]
    else:
        is_name = isinstance(implementation, str)
        candidates = [load(implementation) if is_name else implementation]
    refusals = []
    for backend in candidates:
        reasons = unsupported_reasons(backend, spec, operands)
        if not reasons:
            return backend
        refusals.extend(f"  {backend.name}: {reason}" for reason in reasons)
    who = "no implementation can" if implementation is None else f"{candidates[0].name!r} cannot"
    call = f"{who} run {_described(spec, operands)}:"
    raise NotImplementedError("\n".join([call, *refusals]))


def unsupported_reasons(
    backend: Backend, spec: AttentionSpec, operands: AnyOperands
) -> tuple[str, ...]:
    """Why the backend cannot run the call where its query is; empty where it can."""
    return backend.unsupported_reasons(spec, operands, Device.of(operands.query))


def _described(spec: AttentionSpec, operands: AnyOperands) -> str:
    """A call by its arrays, its options where not default, and its device."""
    arrays = [
        f"{name} {x.dtype}{list(x.shape)}"
        for name, x in operands._asdict().items()
        if x is not None
    ]
    options = [
        f"{field.name}={getattr(spec, field.name)}"
        for field in fields(spec)
        if getattr(spec, field.name) != field.default
    ]
    device = Device.of(operands.query)
    return f"{', '.join(arrays + options)} on {device}"
