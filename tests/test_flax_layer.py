"""`GroupedQueryAttention` beside the same in plain JAX: values, gradients, dtypes, transforms."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from flax_layers import (
    ALL,
    BUDGET,
    ROTARY,
    D,
    H,
    K,
    N,
    both_kinds,
    config_of,
    initial,
    layer_of,
    parameters,
    plain,
    wide,
)
from flax_modules import QUICK, flat, lenient, normal
from implementations import INTERPRET
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import pallas_flash.flax.linen
import pallas_flash.flax.nnx
from pallas_flash.flax import AttentionConfig
from pallas_flash.testing import error

T, S, C = 6, 9, 10


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of a layer.

    Attributes:
      options: of the config.
      arrays: what is given beside hidden states and context, by name.
      batch: all batch dims.
      context: whether there is one, of C features where the config says so.
    """

    options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    arrays: tuple[str, ...] = ()
    batch: tuple[int, ...] = (2,)
    context: bool = False

    @property
    def config(self) -> AttentionConfig:
        return config_of(**self.options)

    def inputs(self, rng: np.random.Generator) -> tuple[jax.Array, ...]:
        hidden = normal(rng, *self.batch, T, D)
        if not self.context:
            return (hidden,)
        return hidden, normal(rng, *self.batch, S, self.config.key_value_features)

    def keywords(self, rng: np.random.Generator) -> dict[str, jax.Array]:
        def lengths(most: int) -> np.ndarray:
            x = np.array(rng.integers(0, most, self.batch, endpoint=True))
            # Where one key alone is seen, all gradients of queries and keys would be zero.
            x.flat[0] = most - 1
            return x

        tokens = (*self.batch, T)
        draws = {
            "lengths": lengths(T),
            "context_lengths": lengths(S),
            "segment_ids": rng.integers(0, 2, tokens),
            "positions": rng.integers(0, 50, tokens),
        }
        return {name: jnp.asarray(draws[name], jnp.int32) for name in self.arrays}


CROSS = {"is_causal": False, "context_features": C}

CASES = {
    "causal": Case(),
    "not causal": Case({"is_causal": False}),
    "bias": Case({"use_bias": True}),
    "bias but of the output": Case({"use_bias": True, "use_output_bias": False}),
    "bias of the output": Case({"use_output_bias": True}),
    "rotary": Case({"rotary": ROTARY}),
    "rotary, positions": Case({"rotary": ROTARY}, ("positions",)),
    "norm": Case({"norm_epsilon": 0.01}),
    "window": Case({"local_window_size": (2, 1), "is_causal": False}),
    "soft cap": Case({"logits_soft_cap": 1.5}),
    "scale": Case({"scale": 0.2}),
    "sinks": Case({"use_sinks": True}, ("lengths",)),
    "lengths": Case({"use_bias": True}, ("lengths",)),
    "segments": Case({}, ("segment_ids",)),
    "cross": Case({**CROSS, "norm_epsilon": 0.01}, ("lengths", "context_lengths"), context=True),
    "cross, features alike": Case({"is_causal": False}, context=True),
    "no batch dim": Case({"rotary": ROTARY}, ("lengths", "segment_ids"), batch=()),
    "all, two batch dims": Case(ALL, ("lengths", "segment_ids", "positions"), batch=(2, 2)),
    "interpret": Case(
        {**ALL, "use_sinks": False, "implementation": INTERPRET}, ("lengths", "positions")
    ),
}

# Takes parameters, then inputs and keywords of the call.
Apply = Callable[..., jax.Array]


def apply_of(kind: str, config: AttentionConfig) -> Apply:
    return lambda params, *inputs, **arrays: layer_of(kind, config, params)(*inputs, **arrays)


def evaluate(
    apply: Apply, params: Any, inputs: tuple[jax.Array, ...], arrays: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """What comes out as "result", and gradients by the names of modules and inputs."""

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(params, inputs, arrays):
        out, vjp = jax.vjp(lambda params, inputs: apply(params, *inputs, **arrays), params, inputs)
        return out, *vjp(jnp.cos(out.astype(jnp.float32)).astype(out.dtype))

    with lenient():
        out, dparams, dinputs = run(params, inputs, arrays)
    # A module's bias and kernel together: that of keys alone has no gradient without an embedding.
    named = dict(zip(("hidden", "context"), dinputs, strict=False))
    return {"result": out, **named, **dparams}


def exact(
    config: AttentionConfig,
    params: Any,
    inputs: tuple[jax.Array, ...],
    arrays: Mapping[str, jax.Array],
) -> dict[str, jax.Array]:
    """The same in plain JAX and float64."""
    with jax.enable_x64(True):
        return evaluate(functools.partial(plain, config), wide(params), wide(inputs), arrays)


def errors(got: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, float]:
    assert got.keys() == expected.keys()
    return {name: error(flat(got[name]), flat(x)) for name, x in expected.items()}


def assert_close(got: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert {name: e for name, e in errors(got, expected).items() if not e <= BUDGET} == {}


def draw(case: Case, rng: np.random.Generator) -> tuple:
    return parameters(case.config, rng), case.inputs(rng), case.keywords(rng)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_option(case, rng, on_cpu):
    drawn = draw(case, rng)
    got = evaluate(apply_of("nnx", case.config), *drawn)
    assert_close(got, exact(case.config, *drawn))


@pytest.mark.parametrize("name", ["bias of the output", "cross", "all, two batch dims"])
def test_linen_gives_the_same_numbers(name, rng):
    case, drawn = CASES[name], draw(CASES[name], rng)
    got = evaluate(apply_of("linen", case.config), *drawn)
    assert_close(got, exact(case.config, *drawn))


def test_padding_may_be_anything(rng):
    """It comes out as if nothing were seen, and no other token sees it."""
    config = config_of(use_bias=True, rotary=ROTARY)
    params, hidden, lengths = parameters(config, rng), normal(rng, 2, T, D), np.array([4, 0])
    run = jax.jit(apply_of("nnx", config))
    out = np.asarray(run(params, hidden, lengths=lengths))
    is_padding = (np.arange(T) >= lengths[:, None])[..., None]
    poisoned = run(params, jnp.where(is_padding, jnp.nan, hidden), lengths=lengths)
    np.testing.assert_array_equal(poisoned, out)
    bias = np.broadcast_to(params["out"]["bias"], out.shape)
    np.testing.assert_array_equal(out[is_padding[..., 0]], bias[is_padding[..., 0]])


# Flax's own norm mixes bfloat16 with float32, so `evaluate` lets promotion have its way.
@both_kinds
def test_bfloat16_with_parameters_in_float32(kind, rng):
    """Off float64 at most twice as far as plain bfloat16 is, and a rounding."""
    options = {"dtype": "bfloat16", "use_bias": True, "norm_epsilon": 0.01, "rotary": ROTARY}
    case = Case(options, ("lengths",))
    params, inputs, arrays = draw(case, rng)
    # What both begin with.
    params, inputs = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), (params, inputs)
    )
    expected = exact(case.config, params, inputs, arrays)
    got = evaluate(apply_of(kind, case.config), params, inputs, arrays)
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, inputs))
    plain_errors = errors(
        evaluate(functools.partial(plain, case.config), *narrow, arrays), expected
    )
    step = float(jnp.finfo(jnp.bfloat16).eps)
    for name, e in errors(got, expected).items():
        assert e <= 2 * plain_errors[name] + step, name
    assert got.pop("result").dtype == jnp.bfloat16
    assert {x.dtype.name for x in jax.tree.leaves(got)} == {"float32"}


@both_kinds
def test_parameters_as_they_are_made(kind):
    """Kernels by `kernel_init`, biases and sinks zero, norms one, all of them in `param_dtype`."""
    shapes = {
        "query": {"kernel": (D, N, H), "bias": (N, H)},
        "key": {"kernel": (D, K, H), "bias": (K, H)},
        "value": {"kernel": (D, K, H), "bias": (K, H)},
        "out": {"kernel": (N, H, D), "bias": (D,)},
        "query_norm": {"scale": (H,)},
        "key_norm": {"scale": (H,)},
        "sinks": (N,),
    }
    config = config_of(**ALL, param_dtype="bfloat16", kernel_init=jax.nn.initializers.constant(3.0))
    with lenient():
        made = jax.jit(lambda: without_metadata(initial(kind, config)))()
    assert jax.tree.map(jnp.shape, made) == shapes
    values = {"kernel": 3.0, "bias": 0.0, "scale": 1.0, "sinks": 0.0}
    for path, x in jax.tree_util.tree_leaves_with_path(made):
        assert x.dtype == jnp.bfloat16
        np.testing.assert_array_equal(x, jnp.full(x.shape, values[path[-1].key], x.dtype))


def without_metadata(params: Any) -> Any:
    return nnx.to_pure_dict(params) if isinstance(params, nnx.State) else linen.unbox(params)


def test_dtype_is_what_inputs_and_parameters_promote_to(rng):
    config = config_of()
    params, hidden = parameters(config, rng), normal(rng, 2, T, D).astype(jnp.bfloat16)
    run = jax.jit(apply_of("nnx", config))
    with jax.numpy_dtype_promotion("standard"):
        got = run(params, hidden)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, run(params, hidden.astype(jnp.float32)))


NAMED = {
    "query": {"kernel": ("embed", "model", None), "bias": ("model", None)},
    "key": {"kernel": ("embed", "model", None), "bias": ("model", None)},
    "value": {"kernel": ("embed", "model", None), "bias": ("model", None)},
    "out": {"kernel": ("model", None, "embed"), "bias": ("embed",)},
    "query_norm": {"scale": (None,)},
    "key_norm": {"scale": (None,)},
    "sinks": ("model",),
}
SPECS = jax.tree.map(
    lambda names: PartitionSpec(*names), NAMED, is_leaf=lambda x: isinstance(x, tuple)
)
AXES = ["embed", "model", None]


def specs_of(params: Any) -> Any:
    if isinstance(params, nnx.State):
        return nnx.to_pure_dict(nnx.get_partition_spec(params))
    return linen.get_partition_spec(params)


def test_axes_are_named_in_linen():
    config = config_of(**ALL, kernel_axes=AXES)
    assert specs_of(jax.eval_shape(lambda: initial("linen", config))) == SPECS


@pytest.mark.usefixtures("on_cpu")
def test_axes_of_a_mesh_in_nnx():
    """Parameters are sharded by them from the start."""
    config, devices = config_of(**ALL, kernel_axes=AXES), jax.devices("cpu")[:4]
    mesh = jax.make_mesh((2, 2), ("embed", "model"), (AxisType.Auto,) * 2, devices=devices)
    with jax.set_mesh(mesh):
        state = jax.jit(lambda: initial("nnx", config))()
    assert specs_of(state) == SPECS
    for path, x in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(state)):
        spec = functools.reduce(lambda tree, key: tree[key.key], path, SPECS)
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)


@both_kinds
def test_without_names_there_is_no_metadata(kind):
    specs = specs_of(jax.eval_shape(lambda: initial(kind, config_of(**ALL))))
    assert jax.tree.structure(specs) == jax.tree.structure(SPECS)
    assert set(jax.tree.leaves(specs)) == {PartitionSpec()}


# Every sort of parameter.
EACH_PARAMETER = {"use_bias": True, "norm_epsilon": 0.01, "use_sinks": True}


def loss(layer: Any, hidden: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(layer(hidden)))


def differentiated(kind: str, rng: np.random.Generator) -> tuple[Any, jax.Array, dict]:
    """Parameters, hidden states, and gradients of `loss` by the names of modules."""
    case = Case(EACH_PARAMETER)
    params, (hidden,), _ = draw(case, rng)
    expected = exact(case.config, params, (hidden,), {})
    return params, hidden, {name: expected[name] for name in params}


@pytest.mark.parametrize("name", ["jax", "nnx", "split and merged", "checkpoint"])
def test_gradients_of_an_nnx_layer(name, rng):
    params, hidden, expected = differentiated("nnx", rng)
    layer = layer_of("nnx", config_of(**EACH_PARAMETER), params)

    def through_split(layer, hidden):
        graph, state = nnx.split(layer)
        return jax.grad(lambda state: loss(nnx.merge(graph, state), hidden))(state)

    gradient = {
        "jax": jax.jit(jax.grad(loss)),
        "nnx": nnx.jit(nnx.grad(loss)),
        "split and merged": jax.jit(through_split),
        "checkpoint": jax.jit(jax.grad(jax.checkpoint(loss))),
    }[name]
    got = gradient(layer, hidden)
    got = nnx.to_pure_dict(nnx.state(got) if isinstance(got, nnx.Module) else got)
    assert_close(got, expected)


def test_layers_of_equal_config_share_what_is_compiled(rng):
    traces = []

    @jax.jit
    def run(layer, hidden):
        traces.append(layer)
        return layer(hidden)

    params, hidden = parameters(config_of(), rng), normal(rng, 2, T, D)
    for window in (2, (2, 2), [2, 2], np.int32(2)):
        config = config_of(local_window_size=window, scale=np.float32(0.5))
        run(layer_of("nnx", config, params), hidden)
    assert len(traces) == 1
    run(layer_of("nnx", config_of(local_window_size=1), params), hidden)
    assert len(traces) == 2


@both_kinds
def test_vmap_over_stacked_layers(kind, rng):
    config = config_of(**EACH_PARAMETER)
    params, hidden = [parameters(config, rng) for _ in range(2)], normal(rng, 2, T, D)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *params)
    if kind == "nnx":
        stacked = layer_of(kind, config, stacked)
        run = jax.vmap(lambda layer, hidden: layer(hidden), (0, None))
    else:
        run = jax.vmap(apply_of(kind, config), (0, None))
    got = jax.jit(run)(stacked, hidden)
    for one, x in zip(params, got, strict=True):
        assert error(flat(x), flat(exact(config, one, (hidden,), {})["result"])) <= BUDGET


class Layers(linen.Module):
    """Two layers, rematerialized, in one scan."""

    config: AttentionConfig

    @linen.compact
    def __call__(self, x):
        layer = linen.remat(pallas_flash.flax.linen.GroupedQueryAttention)(self.config)
        scan = linen.scan(
            lambda layer, x, _: (layer(x), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
        )
        return scan(layer, x, None)[0]


def test_inside_scan_and_remat_of_linen(rng):
    config = config_of(**EACH_PARAMETER)
    params, hidden = [parameters(config, rng) for _ in range(2)], normal(rng, 2, T, D)
    module = Layers(config)
    (name,) = jax.eval_shape(module.init, jax.random.key(0), hidden)["params"]

    def scanned(params, hidden):
        stacked = jax.tree.map(lambda *x: jnp.stack(x), params["first"], params["second"])
        return module.apply({"params": {name: stacked}}, hidden)

    def one_after_the_other(params, hidden):
        return plain(config, params["second"], plain(config, params["first"], hidden))

    params = dict(zip(("first", "second"), params, strict=True))
    expected = evaluate(one_after_the_other, params, (hidden,), {})
    assert_close(evaluate(scanned, params, (hidden,), {}), expected)


def test_linen_looks_after_the_verbs(rng):
    """Interceptors see them, and intermediates hold what they give."""
    config = config_of()
    layer = pallas_flash.flax.linen.GroupedQueryAttention(config)
    variables, hidden = {"params": parameters(config, rng)}, normal(rng, 2, T, D)
    seen = []

    def interceptor(next_function, args, kwargs, context):
        if context.module is not None and type(context.module) is type(layer):
            seen.append(context.method_name)
        return next_function(*args, **kwargs)

    @jax.jit
    def run(variables, hidden):
        with linen.intercept_methods(interceptor):
            _, cache = layer.apply(variables, hidden, capacity=T + 1, method="prefill")
            layer.apply(variables, hidden[:, :1], cache, method="extend")
            return layer.apply(variables, hidden, capture_intermediates=True)

    out, kept = run(variables, hidden)
    np.testing.assert_array_equal(kept["intermediates"]["__call__"][0], out)
    assert {"prefill", "extend", "__call__"} <= set(seen)
