"""The online softmax: any cut into blocks gives one answer, and parts merge into the whole."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import softmax


def dense(logits: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Softmax-weighted values and lse in float64; a row without a finite logit gives 0 and -inf."""
    logits, values = logits.astype(np.float64), values.astype(np.float64)
    most = np.max(logits, axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(logits - np.where(np.isneginf(most), 0, most))
    total = weights.sum(-1, keepdims=True)
    lse = np.where(total == 0, -np.inf, np.log(np.where(total == 0, 1, total)) + most)
    return weights @ values / np.where(total == 0, 1, total), lse[..., 0]


def online(logits: np.ndarray, values: np.ndarray, cuts: list[int], sinks=None):
    state = softmax.init(logits.shape[:-1], values.shape[-1], sinks)
    for start, stop in zip([0, *cuts], [*cuts, logits.shape[-1]], strict=True):
        block = values[start:stop]
        state = softmax.update(
            state, jnp.asarray(logits[:, start:stop]), lambda p, block=block: p @ block
        )
    return softmax.finish(state)


@pytest.fixture
def drawn(seed):
    rng = np.random.default_rng(seed)
    logits = (8 * rng.standard_normal((5, 40))).astype(np.float32)
    logits[1, :20] = -np.inf
    logits[2, 20:] = -np.inf
    logits[3] = -np.inf
    logits[4] -= 30000
    return logits, rng.standard_normal((40, 6)).astype(np.float32)


@pytest.mark.parametrize("cuts", [[], [20], [1, 2, 39], list(range(1, 40)), [0, 40]], ids=str)
def test_any_cut_gives_the_dense_answer(drawn, cuts):
    out, lse, *_ = online(*drawn, cuts)
    expected_out, expected_lse = dense(*drawn)
    np.testing.assert_allclose(out, expected_out, atol=2e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-7)


def test_the_parts_of_lse_hold_what_the_sum_loses(drawn):
    logits, values = drawn
    result = online(logits, values, [20])
    _, expected = dense(logits, values)
    finite = np.isfinite(expected)
    parts = np.float64(result.m) + np.float64(result.log_l)
    np.testing.assert_allclose(parts[finite], expected[finite], rtol=0, atol=1e-6)
    # The row of logits near -30000 has a sum that is off by up to half a float32 step, 0.001.
    assert np.abs(np.float64(result.lse)[4] - expected[4]) < 1.1e-3


def test_no_block_at_all_is_an_empty_row():
    out, lse, m, log_l = softmax.finish(softmax.init((3,), 2))
    np.testing.assert_array_equal(out, np.zeros((3, 2)))
    np.testing.assert_array_equal(lse, np.full(3, -np.inf))
    np.testing.assert_array_equal(np.exp((1e30 - m) - log_l), np.zeros(3))


def test_sinks_are_one_more_logit_without_value(drawn):
    logits, values = drawn
    sinks = np.array([0.5, -np.inf, 3.0, 1.0, -30001.0], np.float32)
    out, lse, *_ = online(logits, values, [13], jnp.asarray(sinks))
    expected = dense(
        np.concatenate([logits, sinks[:, None]], axis=1),
        np.concatenate([values, np.zeros((1, 6), np.float32)]),
    )
    np.testing.assert_allclose(out, expected[0], atol=2e-6)
    np.testing.assert_allclose(lse, expected[1], rtol=2e-7)


@pytest.mark.parametrize("cuts", [[20], [0, 3, 20, 20], list(range(1, 40))], ids=str)
def test_merge_of_parts_is_the_whole(drawn, cuts):
    logits, values = drawn
    parts = [
        online(logits[:, start:stop], values[start:stop], [])
        for start, stop in zip([0, *cuts], [*cuts, 40], strict=True)
    ]
    out, lse = softmax.merge(
        jnp.stack([part.out for part in parts]), jnp.stack([part.lse for part in parts])
    )
    expected_out, expected_lse = dense(logits, values)
    # The weights are exponentials of float32 lse near 30000, a step of 0.002, in the last row.
    np.testing.assert_allclose(out[:4], expected_out[:4], atol=3e-6)
    np.testing.assert_allclose(out[4], expected_out[4], atol=1e-2)
    np.testing.assert_allclose(lse, expected_lse, rtol=3e-7)


def test_a_sink_added_at_the_end_is_one_from_the_start(drawn, seed):
    logits, values = drawn
    sinks = np.random.default_rng(seed).standard_normal(5).astype(np.float32)
    sinks[0] = -np.inf
    expected = online(logits, values, [20], jnp.asarray(sinks))
    plain = online(logits, values, [20])
    out, lse = softmax.add_sink(plain.out, plain.lse, jnp.asarray(sinks))
    np.testing.assert_allclose(out, expected.out, atol=2e-6)
    np.testing.assert_allclose(lse, expected.lse, rtol=2e-7)
    empty = softmax.add_sink(plain.out, plain.lse, jnp.full(5, -jnp.inf))
    np.testing.assert_array_equal(empty[1], plain.lse)
    assert not np.asarray(empty[0])[3].any()
