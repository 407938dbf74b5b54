"""The chip's own instructions, or what the interpreter has for them, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash.backends.triton import lowering

SHAPE = (64, 128)

INSTRUCTIONS = {
    "exp2": lowering.exp2,
    "logistic": functools.partial(lowering.logistic, by_halves=False),
    "logistic by halves": functools.partial(lowering.logistic, by_halves=True),
}


@pytest.fixture(params=["interpret", "triton"])
def evaluated(request):
    """`evaluated(function, *arrays)`: of float32 [64, 128], inside a kernel."""
    interpret = request.param == "interpret"
    if not interpret and jax.default_backend() != "gpu":
        pytest.skip("needs a GPU")
    if interpret:
        request.getfixturevalue("on_cpu")

    def evaluate(function, *arrays):
        def kernel(refs, out_ref):
            where = jnp.arange(SHAPE[0])[:, None], jnp.arange(SHAPE[1])[None, :]
            x = [lowering.load(ref.at[where]) for ref in refs]
            lowering.store(out_ref.at[where], function(*x, interpret=interpret))

        like = jnp.asarray(arrays[0])
        run = lowering.launch(
            kernel,
            name="instruction",
            programs=1,
            outputs=jax.ShapeDtypeStruct(SHAPE, jnp.float32),
            num_warps=4,
            num_stages=1,
            interpret=interpret,
            like=like,
        )
        return np.asarray(run(tuple(map(jnp.asarray, arrays))), np.float64)

    return evaluate


def grid(least: float, most: float) -> np.ndarray:
    return np.linspace(least, most, np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)


def exact(name: str, x: np.ndarray) -> np.ndarray:
    power = np.exp2(-x.astype(np.float64))
    return 1 / power if name == "exp2" else 1 / (1 + power)


# Both sides of what either half of the logistic sees: pairs lie side by side.
@pytest.mark.parametrize("name", INSTRUCTIONS)
@pytest.mark.parametrize("size", [1.0, 20.0, 110.0])
def test_within_a_few_steps(name, size, evaluated):
    x = grid(-size, size)
    got = evaluated(INSTRUCTIONS[name], x)
    # XLA's exp2 on a CPU rounds x * ln 2.
    np.testing.assert_allclose(got, exact(name, x), rtol=(4 + size) * 2**-23, atol=0)


@pytest.mark.parametrize("name", ["logistic", "logistic by halves"])
def test_a_logistic_beyond_all_range(name, evaluated):
    x = np.resize(np.array([np.inf, 3e38, 200.0, np.nan, -200.0, -3e38, -np.inf], "f4"), SHAPE)
    got = evaluated(INSTRUCTIONS[name], x)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(x))
    np.testing.assert_array_equal(got[x > 0], 1.0)
    # The reckoned ones end at 2^-120.
    assert np.all(got[x < 0] <= 2.0**-119)
    assert np.all(got[x < 0] >= 0)


def test_a_product_and_a_difference_round_once_or_twice(evaluated, seed):
    rng = np.random.default_rng(seed)
    x, y, z = (rng.standard_normal(SHAPE, np.float32) for _ in range(3))
    got = evaluated(lowering.fused_difference, x, y, z)
    expected = x.astype(np.float64) * y - z
    np.testing.assert_allclose(got, expected, rtol=0, atol=2**-23 * np.abs(expected).max())
