"""On a mesh the answer is that of one device, whoever partitions: XLA or `shard_map`."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from implementations import INTERPRET, name_of
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_flash import AttentionOutput, flash_attention_with_lse
from pallas_flash.backends.xla import XlaBackend
from pallas_flash.testing import Case, Inputs, differentiate, make_inputs, split

# The mesh is one of CPUs, also where there is a GPU.
pytestmark = pytest.mark.usefixtures("on_cpu")

PLAIN = Case(B=4, T=40, S=40, N=4, K=2, H=8, is_causal=True, scale="traced")
CASES = {
    XlaBackend(block_q=16, block_k=16): dataclasses.replace(PLAIN, bias="BNS", sinks=True),
    INTERPRET: PLAIN,
}


@pytest.fixture(params=CASES, ids=name_of)
def backend(request):
    return request.param


@pytest.fixture
def attend(backend):
    return functools.partial(flash_attention_with_lse, implementation=backend)


@pytest.fixture
def inputs(backend, seed):
    return make_inputs(CASES[backend], seed)


def gradients(attention, inputs: Inputs, arguments):
    call = jax.jit(differentiate, static_argnums=(0, 1))
    return call(attention, tuple(inputs.options.items()), *arguments)


def assert_close(got, expected):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5), got, expected)


def mesh_of(kind: AxisType) -> jax.sharding.Mesh:
    devices = jax.devices("cpu")[:4]
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind), devices=devices)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(
    "axes",
    [("data", None, None), ("data", None, "model"), (None, "data", None)],
    ids=["batch", "batch-and-heads", "length"],
)
def test_sharded_operands(attend, inputs, kind, axes):
    expected = gradients(attend, inputs, split(inputs))
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        primals, others, cotangents = split(inputs)
        pattern = NamedSharding(mesh, PartitionSpec(*axes))
        whole = NamedSharding(mesh, PartitionSpec())
        sharded = {
            name: jax.device_put(x, pattern if name in ("query", "key", "value") else whole)
            for name, x in primals.items()
        }
        cotangents = jax.tree.map(lambda x: jax.device_put(x, pattern), cotangents)
        got = gradients(attend, inputs, (sharded, others, cotangents))
    assert_close(got, expected)
    if kind is AxisType.Explicit:
        for name in ("query", "key", "value"):
            assert got[1][name].sharding.spec[:3] == axes


@pytest.mark.parametrize(
    "shared", [("sinks", "scale"), ("key", "value", "bias", "sinks", "scale")], ids="-".join
)
def test_inside_shard_map(backend, attend, inputs, shared):
    """With operands that vary over the mesh beside some that do not, whose gradients are sums."""
    primals, *rest = split(inputs)
    if "key" in shared:
        # Every device's rows see the same keys.
        one_row = {name: primals[name][:1] for name in ("key", "value", "bias") if name in primals}
        primals = {**primals, **one_row}
    arguments = (primals, *rest)
    specs = {name: PartitionSpec(*(() if name in shared else ("data",))) for name in primals}

    def widened(**operands) -> AttentionOutput:
        rows = operands["query"].shape[0]
        wide = {
            name: jax.numpy.broadcast_to(operands[name], (rows, *operands[name].shape[1:]))
            for name in ("key", "value")
        }
        return attend(**{**operands, **wide})

    def on_mesh(is_causal, **operands) -> AttentionOutput:
        return jax.shard_map(
            lambda operands: widened(**operands, is_causal=is_causal),
            mesh=mesh_of(AxisType.Auto),
            in_specs=(specs,),
            out_specs=PartitionSpec("data"),
            # Pallas's interpreter mixes what varies with indices that do not.
            check_vma=backend is not INTERPRET,
        )(operands)

    got = gradients(on_mesh, inputs, arguments)
    assert_close(got, gradients(widened, inputs, arguments))
