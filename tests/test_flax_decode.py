"""Decoding by Flax's stock modules, one token at a time, with our `attention_fn`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_modules import (
    QUICK,
    B,
    F,
    N,
    T,
    both_kinds,
    functional,
    lenient,
    make,
    needs,
    normal,
    parameters,
    random_mask,
)

from pallas_flash import flash_attention
from pallas_flash.flax import make_attention_fn
from pallas_flash.testing import error


def steps_of(module, params, inputs, masks, **call):
    """The outputs of as many steps as there are inputs; `masks` is what each step is given."""
    is_nnx = isinstance(module, nnx.Module)
    if is_nnx:
        module.init_cache(inputs.shape)
        graph, _, cache = nnx.split(module, nnx.Param, ...)
    else:
        cache = jax.eval_shape(module.init, jax.random.key(0), inputs)["cache"]
        cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), cache)

    def step(cache, now):
        x, mask = now
        if is_nnx:
            merged = nnx.merge(graph, params, cache)
            out = merged(x, mask=mask, **call)
            _, _, cache = nnx.split(merged, nnx.Param, ...)
        else:
            variables = {"params": params, "cache": cache}
            out, changed = module.apply(variables, x, mask=mask, mutable=["cache"], **call)
            cache = changed["cache"]
        return cache, out[:, 0]

    xs = (jnp.moveaxis(inputs, 1, 0)[:, :, None], masks)
    run = jax.jit(functools.partial(jax.lax.scan, step), compiler_options=QUICK)
    with lenient():
        return jnp.moveaxis(run(cache, xs)[1], 0, 1)


SETTINGS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (2, 1)},
    "causal window": {"is_causal": True, "local_window_size": 2},
}


def assert_steps_are_one_pass(kind, settings, rng, *, call=None, **options):
    inputs = normal(rng, B, T, F)
    whole = make(kind, **options)
    params = parameters(whole, rng, (inputs,))
    # A caller's own, which hides some keys of a row at all steps, but not of every row.
    padding = random_mask(rng, B, 1, 1, T).at[0].set(True)
    masks = jnp.broadcast_to(padding, (T, *padding.shape))
    module = make(kind, decode=True, attention_fn=make_attention_fn(**settings), **options)
    got = steps_of(module, params, inputs, masks, **(call or {}))
    left = 2 if "local_window_size" in settings else T
    distance = np.arange(T)[:, None] - np.arange(T)
    visible = jnp.asarray((distance >= 0) & (distance <= left))[None, None] & padding
    with lenient():
        expected = functional(whole)(params, (inputs,), mask=visible)
    # What Flax gives where a query may see nothing is another matter.
    sees = np.asarray(visible.any(-1))[:, 0]
    assert error(np.asarray(got)[sees], np.asarray(expected)[sees]) <= 5e-6


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@both_kinds
def test_steps_give_what_one_causal_pass_gives(kind, settings, rng):
    assert_steps_are_one_pass(kind, settings, rng)


@needs(nnx.MultiHeadAttention.__call__, "is_causal")
def test_steps_of_a_module_that_is_called_causal(rng):
    assert_steps_are_one_pass(nnx.MultiHeadAttention, {}, rng, call={"is_causal": True})


@needs(nnx.MultiHeadAttention.__init__, "num_kv_heads")
def test_steps_with_grouped_key_value_heads(rng):
    assert_steps_are_one_pass(nnx.MultiHeadAttention, SETTINGS["window"], rng, num_kv_heads=2)


def lone_query(rng, length=T):
    return [normal(rng, B, size, N, F) for size in (length, T, T)]


@pytest.mark.parametrize("dtype", [bool, np.float32])
@pytest.mark.parametrize("shape", [(T,), (B, N, 1, T), (B, 1, 1, 1), ()])
def test_a_lone_query_sits_at_the_last_key_that_is_shown(shape, dtype, rng):
    query, key, value = lone_query(rng, 1)
    newest = T - 2
    if shape[-1:] == (T,):
        # To one row and head only.
        mask = (rng.random(shape) < 0.5) & (np.arange(T) <= newest)
        mask[(-1,) * len(shape[:-1]) + (newest,)] = True
    else:
        newest, mask = T - 1, np.ones(shape, bool)
    options = {"is_causal": True, "local_window_size": (1, 0)}
    got = make_attention_fn(**options)(query, key, value, mask=mask.astype(dtype))
    expected = flash_attention(query, key, value, mask=mask, query_offset=newest, **options)
    np.testing.assert_array_equal(got, expected)
    assert np.any(got)


@pytest.mark.parametrize("name", ["causal", "window"])
def test_every_other_call_keeps_its_positions(name, rng):
    settings = SETTINGS[name]
    mask = rng.random((B, 1, 1, T)) < 0.6
    ours = make_attention_fn(**settings)
    for operands, masked in [
        (lone_query(rng, 1), {}),
        (lone_query(rng, 2), {"mask": mask}),
        ([x[:, :1] for x in lone_query(rng)], {"mask": mask[..., :1]}),
    ]:
        expected = flash_attention(*operands, **masked, **settings)
        np.testing.assert_array_equal(ours(*operands, **masked), expected)


def test_a_mask_that_hides_all_gives_zeros(rng):
    got = make_attention_fn(is_causal=True)(*lone_query(rng, 1), mask=np.zeros((B, 1, 1, T)))
    np.testing.assert_array_equal(got, np.zeros_like(got))
