"""Flax's stock attention modules as pure functions, with an `attention_fn` of choice."""

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from pallas_flash.testing import UNTUNED

B, T, F, N = 2, 6, 12, 4

both_kinds = pytest.mark.parametrize(
    "kind", [linen.MultiHeadDotProductAttention, nnx.MultiHeadAttention], ids=["linen", "nnx"]
)

# For tiny modules, which take far longer to compile than to run.
QUICK = UNTUNED | {"xla_backend_optimization_level": 0}

# The parameters, the inputs, then keywords of the call.
Apply = Callable[..., jax.Array]


@contextlib.contextmanager
def lenient() -> Iterator[None]:
    """What Flax itself does not hold to: strict promotion, and no deprecated layer."""
    with (
        warnings.catch_warnings(),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        warnings.filterwarnings("ignore", "SelfAttention will be deprecated", DeprecationWarning)
        yield


def has(function: Callable, name: str) -> bool:
    """Whether this Flax has that argument."""
    return name in inspect.signature(function).parameters


def needs(function: Callable, name: str) -> pytest.MarkDecorator:
    """Skips on a Flax that has not that argument."""
    return pytest.mark.skipif(not has(function, name), reason=f"this Flax has no {name}")


def make(kind: type, **options: object) -> Any:
    """A module of `N` heads and `F` features. Its parameters are to be drawn: `parameters`."""
    zeros = jax.nn.initializers.zeros
    sizes: dict[str, object] = {"num_heads": N, "qkv_features": 2 * F, "kernel_init": zeros}
    if kind is nnx.MultiHeadAttention:
        sizes |= {"in_features": F, "decode": False, "rngs": nnx.Rngs(0)}
    return kind(**sizes | options)


def functional(module: Any, attention_fn: Callable | None = None) -> Apply:
    """The module with that attention, or with its own, as a function of its parameters."""
    if isinstance(module, linen.Module):
        if attention_fn is not None:
            module = module.clone(attention_fn=attention_fn)
        return lambda params, inputs, **call: module.apply({"params": params}, *inputs, **call)
    graph, _, rest = nnx.split(module, nnx.Param, ...)
    own = module.attention_fn

    def apply(params, inputs, **call):
        merged = nnx.merge(graph, params, rest)
        merged.attention_fn = attention_fn or own
        return merged(*inputs, **call)

    return apply


def parameters(module: Any, rng: np.random.Generator, inputs: tuple[jax.Array, ...]) -> Any:
    """Random, biases too."""
    if isinstance(module, linen.Module):
        with lenient():
            params = jax.eval_shape(module.init, jax.random.key(0), *inputs)["params"]
    else:
        params = nnx.state(module, nnx.Param)
    return jax.tree.map(lambda x: normal(rng, *x.shape, spread=F**-0.5), params)


def evaluate(
    apply: Apply, params: Any, inputs: tuple[jax.Array, ...], **call: object
) -> dict[str, np.ndarray]:
    """The output and the gradients of a weighted sum of it, each as one vector."""

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(params, inputs):
        def loss(params, inputs):
            out = apply(params, inputs, **call)
            weights = jnp.cos(jnp.arange(out.size)).reshape(out.shape)
            return jnp.sum(out.astype(jnp.float32) * weights), out

        gradients, out = jax.grad(loss, (0, 1), has_aux=True)(params, inputs)
        return {"out": out, "dparameters": gradients[0], "dinputs": gradients[1]}

    with lenient():
        return {name: flat(x) for name, x in run(params, inputs).items()}


def flat(tree: Any) -> np.ndarray:
    """All of its numbers as one vector."""
    return np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(tree)])


def normal(rng: np.random.Generator, *shape: int, spread: float = 1.0) -> jax.Array:
    return jnp.asarray(spread * rng.standard_normal(shape), np.float32)


def random_mask(rng: np.random.Generator, *shape: int) -> jax.Array:
    """Bools; every query sees a key, for what one that sees none gives is not the same."""
    mask = rng.random(shape) < 0.6
    mask[..., 0] = True
    return jnp.asarray(mask)
