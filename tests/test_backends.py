"""Which backend runs a call, and what is said where none can."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import IMPLEMENTATIONS, backends, flash_attention
from pallas_flash.backends.xla import XlaBackend
from pallas_flash.spec import AttentionSpec, Operands

QUERY = jnp.asarray(np.random.default_rng().standard_normal((2, 8, 4, 16)), jnp.float32)
KEY = QUERY[:, :, :2]
OPERANDS = Operands(QUERY, KEY, KEY)


@dataclasses.dataclass(frozen=True)
class Unwilling(XlaBackend):
    """A backend that has reasons."""

    @property
    def name(self):
        return "unwilling"

    def unsupported_reasons(self, spec, operands, device):
        query = operands.query
        return (f"no {query.dtype} with head dim {query.shape[-1]}", f"not on {device.platform}")


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_every_name_loads_a_hashable_value_of_that_name(name):
    backend = backends.load(name)
    assert backend.name == name
    assert hash(backend) == hash(backends.load(name))
    assert backend == backends.load(name)


def test_none_takes_xla_where_no_gpu_is():
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    assert backends.select(None, AttentionSpec(), OPERANDS).name == "xla"


def test_none_takes_the_next_candidate_in_silence(monkeypatch, capfd):
    monkeypatch.setattr(
        backends, "load", lambda name: XlaBackend() if name == "xla" else Unwilling()
    )
    assert backends.select(None, AttentionSpec(), OPERANDS) == XlaBackend()
    assert capfd.readouterr() == ("", "")


def test_a_refusal_has_the_inputs_once_and_every_reason(monkeypatch):
    monkeypatch.setattr(backends, "load", lambda name: Unwilling())
    with pytest.raises(NotImplementedError) as refusal:
        flash_attention(QUERY, KEY, KEY, is_causal=True)
    platform = jax.default_backend()
    first, *rest = str(refusal.value).splitlines()
    assert "query float32[2, 8, 4, 16]" in first
    assert "key float32[2, 8, 2, 16]" in first
    assert "is_causal=True" in first
    assert platform in first
    reasons = ["  unwilling: no float32 with head dim 16", f"  unwilling: not on {platform}"]
    assert rest == reasons * 2


@pytest.mark.parametrize("name", ["triton", "interpret"])
@pytest.mark.parametrize(
    "transform", [lambda f: f, jax.jit, jax.vmap, jax.grad], ids=["eager", "jit", "vmap", "grad"]
)
def test_a_named_implementation_does_not_fall_back(name, transform):
    def call(query):
        return jnp.sum(flash_attention(query, KEY, KEY, bias, implementation=name))

    bias = jnp.ones((8, 8), jnp.float32)

    query = jnp.stack([QUERY, QUERY]) if transform is jax.vmap else QUERY
    with pytest.raises(NotImplementedError, match=f"{name}: the kernels do not read a bias yet"):
        transform(call)(query)


def test_a_backend_value_runs_the_call():
    expected = flash_attention(QUERY, KEY, KEY, implementation="xla")
    got = flash_attention(QUERY, KEY, KEY, implementation=XlaBackend(block_q=3, block_k=5))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)
    with pytest.raises(NotImplementedError, match="unwilling: "):
        flash_attention(QUERY, KEY, KEY, implementation=Unwilling())


def test_a_device_is_that_of_a_concrete_array_or_the_default():
    cpu = jax.devices("cpu")[0]
    expected = backends.Device("cpu", cpu.device_kind)
    assert backends.Device.of(jax.device_put(QUERY, cpu)) == expected
    traced_on = []

    def call(x):
        traced_on.append(backends.Device.of(x))
        return x

    with jax.default_device(cpu):
        jax.jit(call)(QUERY)
    assert traced_on == [expected]


@pytest.mark.parametrize(
    ("capability", "expected"), [("9.0", "9.0"), ("12.1", "12.1"), ("gfx942:sramecc+", None)]
)
def test_only_nvidia_gpus_have_a_compute_capability(capability, expected, monkeypatch):
    class Gpu:
        platform, device_kind, compute_capability, id = "gpu", "some GPU", capability, 0

    monkeypatch.setattr(jax, "devices", lambda *_: [Gpu()])
    device = backends.Device.of(np.ones(3))
    assert device == backends.Device("gpu", "some GPU", expected)
    if expected is None:
        reasons = backends.load("triton").unsupported_reasons(AttentionSpec(), OPERANDS, device)
        assert "compute capability 8.0 or later, not gpu (some GPU)" in reasons[0]


def test_only_what_runs_is_loaded():
    code = (
        "import sys, jax.numpy as jnp, pallas_flash; x = jnp.ones((1, 4, 1, 8));"
        "pallas_flash.flash_attention(x, x, x, implementation='xla');"
        "print(*(m for m in sys.modules if m.startswith('pallas_flash.backends.')))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "pallas_flash.backends.xla" in loaded
    assert "pallas_flash.backends.triton" not in loaded
