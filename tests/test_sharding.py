"""On a mesh the answer is that of one device, whoever partitions: XLA or `shard_map`."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_flash import AttentionOutput, flash_attention_with_lse
from pallas_flash.backends.xla import XlaBackend
from pallas_flash.testing import Case, Inputs, differentiate, make_inputs, split

BLOCKS = XlaBackend(block_q=16, block_k=16)
CASE = Case(B=4, T=40, S=40, N=4, K=2, H=8, is_causal=True, bias="BNS", sinks=True, scale="traced")


def attend(**arguments) -> AttentionOutput:
    return flash_attention_with_lse(**arguments, implementation=BLOCKS)


def gradients(inputs: Inputs, arguments, attention=attend):
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
def test_sharded_operands(kind, axes, seed):
    inputs = make_inputs(CASE, seed)
    expected = gradients(inputs, split(inputs))
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
        got = gradients(inputs, (sharded, others, cotangents))
    assert_close(got, expected)
    if kind is AxisType.Explicit:
        for name in ("query", "key", "value"):
            assert got[1][name].sharding.spec[:3] == axes


@pytest.mark.parametrize(
    "shared", [("sinks", "scale"), ("key", "value", "bias", "sinks", "scale")], ids="-".join
)
def test_inside_shard_map(shared, seed):
    """With operands that vary over the mesh beside some that do not, whose gradients are sums."""
    inputs = make_inputs(CASE, seed)
    arguments = split(inputs)
    if "key" in shared:
        # Every device's rows see the same keys.
        one_row = {name: arguments[0][name][:1] for name in ("key", "value", "bias")}
        arguments = ({**arguments[0], **one_row}, *arguments[1:])
    specs = {name: PartitionSpec("data") for name in arguments[0]}
    specs |= {name: PartitionSpec() for name in shared}

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
        )(operands)

    got = gradients(inputs, arguments, on_mesh)
    assert_close(got, gradients(inputs, arguments, widened))
