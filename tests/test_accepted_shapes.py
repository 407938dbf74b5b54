"""Batch dims, broadcast forms and empty axes: each means what the plainest form means."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equal_calls import (
    OPTIONS,
    SIZES,
    assert_close,
    assert_means,
    assert_same,
    case_of,
    given_to_backend,
    run,
    with_batch,
)
from implementations import judge

from pallas_flash import flash_attention, flash_attention_with_lse
from pallas_flash.reference import reference_attention
from pallas_flash.testing import DIFFERENTIABLE, Case, Inputs, make_inputs


@pytest.mark.parametrize("batch", [(), (2, 3), (1, 6, 1)], ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_batch_dims(option, batch, seed):
    size = int(np.prod(batch, dtype=int))
    flat = make_inputs(case_of(option, size), seed)
    shaped = with_batch(flat, (size,), batch)
    assert_means({**shaped.arrays, **shaped.options}, {**flat.arrays, **flat.options})


@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
def test_batch_dims_of_results(batch, seed):
    size = int(np.prod(batch, dtype=int))
    flat = make_inputs(case_of("all", size), seed)
    shaped = with_batch(flat, (size,), batch)
    got = run(shaped)
    assert got["out"].shape == (*batch, SIZES["T"], SIZES["N"], SIZES["Hv"])
    assert got["lse"].shape == (*batch, SIZES["T"], SIZES["N"])
    for name in set(DIFFERENTIABLE) & set(shaped.arrays):
        assert got[f"d{name}"].shape == shaped.arrays[name].shape, name
    assert_same(got, run(flat))


def test_the_flat_call_is_right(seed):
    _, wrong = judge("xla", make_inputs, case_of("all", 6), seed)
    assert wrong == []


FULL = (2, 3, SIZES["N"], SIZES["T"], SIZES["S"])

BROADCAST = [shape for dims in range(6) for shape in itertools.product("1x", repeat=dims)]


def sizes_of(shape: tuple[str, ...]) -> tuple[int, ...]:
    """Each axis of `FULL` whole (x), 1 or missing."""
    full = FULL[len(FULL) - len(shape) :]
    return tuple(whole if axis == "x" else 1 for axis, whole in zip(shape, full, strict=True))


def draw_pairs(shape: tuple[int, ...], seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    bias = rng.standard_normal(shape).astype(np.float32)
    return {"bias": bias, "mask": rng.random(shape) < 0.7}


@pytest.mark.parametrize("shape", BROADCAST, ids=lambda x: "".join(x) or "scalar")
def test_bias_and_mask_broadcast(shape, seed):
    """And no axis but the batch's is made whole for it."""
    inputs = with_batch(make_inputs(case_of("plain", 6), seed), (6,), (2, 3)).arrays
    pairs = draw_pairs(sizes_of(shape), seed)
    _, operands = given_to_backend(**inputs, **pairs)
    padded = (1,) * (5 - len(shape)) + sizes_of(shape)
    is_batched = max(padded[:2]) > 1
    for name, x in pairs.items():
        got = getattr(operands, name)
        assert got.shape == (6 if is_batched else 1, *padded[2:])
        whole = np.broadcast_to(x, FULL).reshape(6, *FULL[2:])
        np.testing.assert_array_equal(np.broadcast_to(got, whole.shape), whole, name)


@pytest.mark.parametrize("shape", ["", "1x1x", "x1111", "xx1x1"], ids=lambda x: x or "scalar")
def test_gradient_of_a_broadcast_bias(shape, seed):
    inputs = with_batch(make_inputs(case_of("plain", 6), seed), (6,), (2, 3))
    pairs = draw_pairs(sizes_of(tuple(shape)), seed)
    whole = {name: np.broadcast_to(x, FULL) for name, x in pairs.items()}
    got, expected = (
        run(Inputs({**inputs.arrays, **x}, {}, inputs.dout, inputs.dlse)) for x in (pairs, whole)
    )
    padded = (1,) * (5 - len(shape)) + sizes_of(tuple(shape))
    axes = tuple(i for i, size in enumerate(padded) if size == 1)
    expected["dbias"] = np.sum(expected["dbias"], axes, keepdims=True).reshape(pairs["bias"].shape)
    assert_close(got, expected)


@pytest.mark.parametrize(
    ("option", "empty"),
    [("plain", "T"), ("plain", "S"), ("all", "B"), ("all", "T"), ("all", "S"), ("all", "BTS")],
)
def test_empty_axes(option, empty, seed):
    sizes = {"B": 2, **dict.fromkeys(empty, 0)}
    batch = sizes.pop("B")
    inputs = make_inputs(case_of(option, batch, **sizes), seed)
    got = run(inputs)
    assert got["out"].shape == inputs.dout.shape
    assert got["lse"].shape == inputs.dlse.shape
    for name, x in inputs.arrays.items():
        if name in DIFFERENTIABLE:
            assert got[f"d{name}"].shape == x.shape
            is_sink_alone = name == "sinks" and empty == "S"
            assert is_sink_alone or not np.any(got[f"d{name}"]), name
    if empty == "S" and option == "all":
        assert_close(got, run(inputs, reference_attention))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)], ids=str)
def test_empty_among_several_batch_dims(shape, seed):
    inputs = with_batch(make_inputs(case_of("all", 0), seed), (0,), shape)
    _, operands = given_to_backend(**inputs.arrays, **inputs.options)
    empty = {name for name, x in operands._asdict().items() if np.size(x) == 0}
    assert empty == set(inputs.arrays) - {"sinks", "scale"}
    out = flash_attention(**inputs.arrays, **inputs.options)
    assert out.shape == (*shape, SIZES["T"], SIZES["N"], SIZES["Hv"])


def mask(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """In which every row sees the first key."""
    x = rng.random(shape) < 0.7
    x[..., 0] = True
    return x


def bias(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


LENGTHS = np.array([3, 7], np.int32)

# For B = 2, N = 4, T = 5 and S = 7, written as `jax.nn.dot_product_attention` wants them.
JAX_NN = {
    "2d": lambda rng: {"bias": bias(rng, 5, 7), "mask": mask(rng, 1, 7), "local_window_size": 6},
    "3d": lambda rng: {"bias": bias(rng, 4, 1, 7), "mask": mask(rng, 1, 5, 7), "is_causal": True},
    "4d": lambda rng: {"bias": bias(rng, 2, 1, 5, 1), "mask": mask(rng, 2, 4, 1, 7), "scale": 0.3},
    "lengths": lambda rng: {
        "query_seq_lengths": LENGTHS - 2,
        "key_value_seq_lengths": LENGTHS,
        "local_window_size": (5, 2),
    },
}


@pytest.mark.parametrize("is_batched", [True, False], ids=["BTNH", "TNH"])
@pytest.mark.parametrize("call", JAX_NN)
def test_like_jax_nn(call, is_batched, seed):
    """Without a batch dim its lengths are [1] all the same, and a bias or mask may be 4-D."""
    inputs = make_inputs(Case(B=2, T=5, S=7, N=4, K=2, H=8), seed)
    arrays, options = inputs.arrays, JAX_NN[call](np.random.default_rng(seed))
    dout = jnp.asarray(inputs.dout)
    if not is_batched:
        arrays, dout = {name: x[0] for name, x in arrays.items()}, dout[0]
        options = {
            name: x[:1] if "lengths" in name or np.ndim(x) == 4 else x
            for name, x in options.items()
        }
    primals = {**arrays, **{name: options.pop(name) for name in ("bias",) if name in options}}

    @jax.jit
    def both(primals):
        return [
            {"out": out, **vjp(dout)[0]}
            for out, vjp in (
                jax.vjp(lambda x, f=attention: f(**x, **options), primals)
                for attention in (flash_attention, jax.nn.dot_product_attention)
            )
        ]

    with jax.default_matmul_precision("highest"):
        assert_close(*both(primals))


def test_lists_all_the_way():
    query = [[[1.0, 0.0]], [[0.0, 1.0]]]
    out = flash_attention(
        query, query, query, bias=[[0.0, -1.0]], mask=[[True, False], [True, True]]
    )
    assert out.shape == (2, 1, 2)
    np.testing.assert_array_equal(out[0], query[0])


def test_scalar_bias_and_mask():
    query = jnp.ones((1, 2, 1, 4))
    out, lse = flash_attention_with_lse(query, query, query, 0.5, True)
    np.testing.assert_allclose(lse, 2.5 + np.log(2), rtol=1e-6)
    np.testing.assert_allclose(out, 1.0)
    assert np.isneginf(flash_attention_with_lse(query, query, query, None, False).lse).all()
