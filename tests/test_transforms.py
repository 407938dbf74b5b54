"""Attention under JAX's transforms: the answer stays, and what is not offered is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from implementations import INTERPRET, export, name_of, runnable

from pallas_flash import LSE_NAME, OUT_NAME
from pallas_flash.backends.xla import XlaBackend
from pallas_flash.testing import Case, error, make_inputs

SMALL = Case(B=2, T=24, S=40, N=4, K=2, H=8)


@pytest.fixture(params=[XlaBackend(block_q=16, block_k=16), INTERPRET, "triton"], ids=name_of)
def attend_with_lse(request):
    return runnable(request.param, make_inputs(SMALL, seed=0), precision=None)


@pytest.fixture
def attend(attend_with_lse):
    return lambda *qkv, **options: attend_with_lse(*qkv, **options).out


@pytest.fixture
def loss(attend):
    return lambda *qkv: jnp.sum(jnp.sin(attend(*qkv, is_causal=True)))


@pytest.fixture
def output_and_gradients(attend):
    """What `loss` is summed from, and its gradients.

    The sum itself tells little: its terms cancel, and how far it is off hangs on the order in
    which a machine adds them.
    """

    def function(*qkv):
        out, vjp = jax.vjp(functools.partial(attend, is_causal=True), *qkv)
        return out, *vjp(jnp.cos(out))

    return function


@pytest.fixture
def qkv(seed):
    arrays = make_inputs(SMALL, seed).arrays
    return [jnp.asarray(arrays[name]) for name in ("query", "key", "value")]


def assert_trees_equal(x, y):
    jax.tree.map(np.testing.assert_array_equal, x, y)


def assert_trees_close(x, y, tolerance=2e-6):
    """Arrays may differ by some float32 steps of their largest entry."""
    for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
        assert error(np.asarray(a), np.asarray(b)) <= tolerance


def test_jit_and_eager_agree(output_and_gradients, qkv):
    assert_trees_close(output_and_gradients(*qkv), jax.jit(output_and_gradients)(*qkv))


def test_same_inputs_give_the_same_bits(loss, qkv):
    gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    first = gradient(*qkv)
    for _ in range(3):
        assert_trees_equal(first, gradient(*qkv))


def test_scan_over_layers_is_the_loop(attend, qkv):
    query, key, value = qkv
    keys = jnp.stack([key, -key, 2.0 * key])

    def layer(x, key):
        return x + attend(x, key, value), None

    def scanned(x):
        return jax.lax.scan(layer, x, keys)[0]

    def looped(x):
        for key in keys:
            x, _ = layer(x, key)
        return x

    def output_and_gradient(layers):
        out, vjp = jax.vjp(layers, query)
        return out, *vjp(jnp.cos(out))

    assert_trees_close(output_and_gradient(scanned), output_and_gradient(looped), 1e-5)


NAMED = jax.checkpoint_policies.save_only_these_names(OUT_NAME, LSE_NAME)


@pytest.mark.parametrize(
    "policy", [None, NAMED, jax.checkpoint_policies.dots_saveable], ids=["all", "named", "dots"]
)
def test_remat_gives_the_same_bits(loss, qkv, policy):
    plain = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    again = jax.jit(jax.grad(jax.checkpoint(loss, policy=policy), argnums=(0, 1, 2)))
    assert_trees_equal(plain(*qkv), again(*qkv))


@pytest.mark.parametrize(("policy", "runs"), [(None, 2), (NAMED, 1)], ids=["all", "named"])
def test_remat_runs_the_forward_again_only_where_asked(loss, qkv, policy, runs):
    gradient = jax.grad(jax.checkpoint(loss, policy=policy), argnums=(0, 1, 2))
    assert str(jax.make_jaxpr(gradient)(*qkv)).count("name=forward") == runs


def test_checkpoint_names_are_in_the_differentiated_call(loss, qkv):
    text = str(jax.make_jaxpr(jax.grad(loss))(*qkv))
    assert f"name={OUT_NAME}" in text
    assert f"name={LSE_NAME}" in text


@pytest.mark.parametrize(
    "mapped",
    [(0, None, None), (None, 0, 0), (0, 0, 0), (None, None, 1)],
    ids=["query", "key-value", "all", "value"],
)
def test_vmap_is_the_loop(output_and_gradients, qkv, mapped):
    def stack(x, axis):
        return x if axis is None else jnp.stack([x, -0.5 * x, x[..., ::-1]], axis)

    def pick(x, axis, index):
        return x if axis is None else jnp.take(x, index, axis)

    stacked = [stack(x, axis) for x, axis in zip(qkv, mapped, strict=True)]
    each = [
        output_and_gradients(
            *(pick(x, axis, index) for x, axis in zip(stacked, mapped, strict=True))
        )
        for index in range(3)
    ]
    expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    assert_trees_close(jax.vmap(output_and_gradients, mapped)(*stacked), expected)


def test_vmap_three_deep(attend, qkv):
    query, key, value = qkv
    queries = jnp.stack([query, -query])
    values = jnp.stack([value, value + 1.0])
    over = jax.vmap(jax.vmap(jax.vmap(attend, (None, None, 0)), (None, 0, None)), (0, None, None))
    got = over(queries, jnp.stack([key, 2.0 * key, key]), values)
    assert_trees_close(got[1, 1, 0], attend(-query, 2.0 * key, value))
    assert got.shape == (2, 3, 2, *query.shape)


def test_vmap_over_lengths_and_offsets(attend, qkv):
    query, key, value = qkv
    lengths = jnp.array([[3, 40], [0, 17]], jnp.int32)
    offsets = jnp.array([[0, 5], [16, -3]], jnp.int32)

    def call(lengths, offsets):
        return attend(
            query, key, value, is_causal=True, key_value_seq_lengths=lengths, query_offset=offsets
        )

    expected = jnp.stack([call(*pair) for pair in zip(lengths, offsets, strict=True)])
    assert_trees_close(jax.vmap(call)(lengths, offsets), expected)


def test_gradient_through_a_merge_of_parts(attend, attend_with_lse, qkv):
    def whole(query, key, value):
        return jnp.sum(jnp.sin(attend(query, key, value)))

    def merged(query, key, value):
        parts = [
            attend_with_lse(query, key[:, part], value[:, part])
            for part in (slice(0, 13), slice(13, 40))
        ]
        weights = jax.nn.softmax(jnp.stack([part.lse for part in parts]), axis=0)
        out = sum(w[..., None] * part.out for w, part in zip(weights, parts, strict=True))
        return jnp.sum(jnp.sin(out))

    arguments = (0, 1, 2)
    assert_trees_close(
        jax.grad(merged, arguments)(*qkv), jax.grad(whole, arguments)(*qkv), tolerance=3e-6
    )


DERIVATIVES = {
    "jvp": lambda loss: lambda *qkv: jax.jvp(loss, qkv, qkv),
    "jacfwd": jax.jacfwd,
    "hessian": jax.hessian,
    "jacrev-of-grad": lambda loss: jax.jacrev(jax.grad(loss)),
    "grad-of-grad": lambda loss: jax.jit(jax.grad(lambda *qkv: jnp.sum(jax.grad(loss)(*qkv) ** 2))),
}


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
def test_other_derivatives_are_refused(loss, qkv, derivative):
    with pytest.raises((TypeError, NotImplementedError), match=r"forward mode|forward-mode"):
        derivative(loss)(*qkv)


def test_export_round_trip_is_bitwise(loss, qkv):
    exported = export(jax.jit(loss), *qkv)
    again = jax.export.deserialize(exported.serialize(vjp_order=1))
    assert_trees_equal(again.call(*qkv), jax.jit(loss)(*qkv))
    gradient = jax.grad(again.call, argnums=(0, 1, 2))(*qkv)
    assert_trees_equal(gradient, jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*qkv))
