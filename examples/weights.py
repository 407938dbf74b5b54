"""Puts the arrays of a file, which has its own names for them, into a `Decoder`."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from decoder import Decoder, DecoderConfig
from flax import nnx
from jax.typing import DTypeLike

from pallas_flash.validate import arguments


class WeightsError(Exception):
    """The weights are missing, broken, or of another kind of model."""


@dataclass(frozen=True)
class Tensor:
    """One array of a file, read when it is called for."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def fill(
    config: DecoderConfig,
    names: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    dtype: DTypeLike,
) -> Decoder:
    """A decoder that holds `tensors`, all of them.

    Args:
      config: of a decoder that does not scan.
      names: the tensor of each parameter, as in {"layers.{}.up.kernel": "blk.{}.ffn_up.weight"},
        where {} stands for the layer's index.
      tensors: by name; a matrix is [outputs, inputs], with heads that follow one another.
      dtype: of the parameters: float32, bfloat16 or float16.

    Raises:
      WeightsError: a tensor is missing, of a wrong shape, or none of the decoder's.
    """
    dtype = arguments.dtype("dtype", dtype)
    config = replace(config, attention=replace(config.attention, param_dtype=dtype))
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    parameters = dict(nnx.to_flat_state(state))
    tensor_of = {path: _name(path, names) for path in parameters}
    # All that can be refused is, before the first is read.
    for path, name in tensor_of.items():
        if name not in tensors:
            raise WeightsError(f"the weights have no tensor {name!r}")
        expected = _stored_shape(path, parameters[path].shape)
        if tensors[name].shape != expected:
            raise WeightsError(
                f"tensor {name!r} of the weights has shape {list(tensors[name].shape)}, expected "
                f"{list(expected)}"
            )
    for name in sorted(tensors.keys() - set(tensor_of.values())):
        raise WeightsError(f"the weights have tensor {name!r}, which has no place in the decoder")
    for path, parameter in parameters.items():
        array = tensors[tensor_of[path]].read()
        array = (array.T if path[-1] == "kernel" else array).reshape(parameter.shape)
        parameters[path] = parameter.replace(jnp.array(array, dtype))
    return nnx.merge(graph, nnx.from_flat_state(parameters))


def _name(path: tuple, names: Mapping[str, str]) -> str:
    """The tensor of a parameter, whose path is as in ("layers", 0, "up", "kernel")."""
    indices = [part for part in path if isinstance(part, int)]
    key = ".".join("{}" if isinstance(part, int) else part for part in path)
    return names[key].format(*indices)


def _stored_shape(path: tuple, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the tensor that becomes a parameter of `shape`."""
    if path[-1] == "embedding":
        return shape
    if path[-1] != "kernel":
        return (math.prod(shape),)
    # Where attention ends, all dims but the last are inputs; elsewhere the first one is.
    outputs = -1 if path[-2] == "out" else 1
    return math.prod(shape[outputs:]), math.prod(shape[:outputs])
