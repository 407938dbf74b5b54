"""Attention on a mesh: inside `jax.shard_map`, and where the mesh has explicit axes.

On a mesh with automatic axes there is nothing to do: XLA partitions a backend's plain JAX itself.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType, PartitionSpec

from pallas_flash.spec import AnyOperands, DecodeOperands, ForwardOutput, Operands

Call = TypeVar("Call", Operands, DecodeOperands)


def vary_alike(operands: Call) -> Call:
    """Inside `jax.shard_map`: every operand varying over each mesh axis that one of them does.

    JAX then sums the gradient of an operand that was shared over the axes it was shared over.
    """
    leaves = jax.tree.leaves(operands)
    axes = frozenset().union(*(_varying(x) for x in leaves))
    return _vary(operands, axes)


def vary_like(tree: Any, like: jax.Array) -> Any:
    """Arrays made inside, as a loop's first carry, varying over the axes that `like` does."""
    return _vary(tree, _varying(like))


def _varying(x: jax.Array) -> frozenset[str]:
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def _vary(tree: Any, axes: frozenset[str]) -> Any:
    def vary(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - _varying(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree)


def automatic(function: Callable, out_like: Any) -> Callable:
    """Let XLA partition what runs inside, also on a mesh with explicit axes.

    There every operation's sharding is a type, and a loop over blocks of a sharded length has none.

    Args:
      function: of arrays.
      out_like: a pytree in the results' structure: for each its PartitionSpec, or an array that
        is sharded as it shall be.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in mesh.axis_types:
        return function
    specs = jax.tree.map(
        lambda x: x if isinstance(x, PartitionSpec) else jax.typeof(x).sharding.spec,
        out_like,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
    return jax.sharding.auto_axes(function, out_sharding=specs)


def forward_like(operands: AnyOperands, with_lse: bool, with_statistics: bool) -> ForwardOutput:
    """How the results of a forward are sharded: rows as the query's, features whole."""
    batch, length, heads = jax.typeof(operands.query).sharding.spec[:3]
    rows = (batch, length, heads)
    statistics = PartitionSpec(batch, heads, length) if with_statistics else None
    lse = PartitionSpec(*rows) if with_lse else None
    specs: Any = (PartitionSpec(*rows, None), lse, statistics, statistics)
    return ForwardOutput(*specs)
