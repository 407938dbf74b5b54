"""A call written for `jax.nn.dot_product_attention` gives the same here, wherever contracts agree.

They do where every row sees a key, and without what `jax.nn` does not have.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import flash_attention, flash_attention_with_lse
from pallas_flash.spec import AttentionOutput
from pallas_flash.testing import Case, error, evaluate, make_inputs

GROUPED = {"T": 40, "S": 72, "N": 6, "K": 2}

CASES = [
    Case(**GROUPED),
    Case(**GROUPED, is_causal=True),
    Case(T=72, S=40, is_causal=True),
    Case(**GROUPED, scale=0.3, bias="NTS"),
    Case(**GROUPED, bias="BNTS", is_causal=True),
    Case(**GROUPED, bias="S"),
    Case(**GROUPED, mask="NS", spread=2.0),
    Case(T=70, S=70, local_window_size=(9, 3)),
    Case(T=70, S=70, local_window_size=(9, 0), is_causal=True, N=4, K=2),
    Case(**GROUPED, key_value_seq_lengths=(72, 5)),
    Case(**GROUPED, key_value_seq_lengths=(20, 1), query_seq_lengths=(40, 7), is_causal=True),
    Case(**GROUPED, dtype="bfloat16", is_causal=True),
    Case(**GROUPED, dtype="float16", bias="TS"),
]


def theirs(**arguments) -> AttentionOutput:
    """`jax.nn`'s attention, with an lse that has no gradient and is no part of the comparison."""
    out = jax.nn.dot_product_attention(**arguments)
    return AttentionOutput(out, jnp.zeros(out.shape[:-1], jnp.float32))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_values_and_gradients_agree(case, seed):
    if case.dtype == "float16" and jax.default_backend() == "cpu":
        pytest.skip("jax.nn does not compile for float16 on a CPU")
    inputs = make_inputs(case, seed)
    inputs.dlse[:] = 0
    got = evaluate(flash_attention_with_lse, inputs)
    # It promotes 16-bit types by itself, in its gradient too, which strict promotion forbids.
    with jax.numpy_dtype_promotion("standard"):
        expected = evaluate(theirs, inputs)
    # Both sides round: in 16 bits, once more for the probabilities, and theirs the gradient's too.
    tolerance = 8 * float(jnp.finfo(case.dtype).eps) if case.dtype != "float32" else 5e-6
    errors = {name: error(got[name], value) for name, value in expected.items() if name != "lse"}
    assert {name: e for name, e in errors.items() if e > tolerance} == {}


def test_without_a_batch_dim(seed):
    inputs = make_inputs(Case(B=1, **GROUPED, bias="NTS"), seed).arrays
    query, key, value, bias = (inputs[name] for name in ("query", "key", "value", "bias"))
    for each_bias in (bias, bias[0], bias[0, 0]):
        got = flash_attention(query[0], key[0], value[0], each_bias, is_causal=True)
        expected = jax.nn.dot_product_attention(
            query[0], key[0], value[0], each_bias, is_causal=True
        )
        assert got.shape == expected.shape
        np.testing.assert_allclose(got, expected, rtol=0, atol=3e-6)


def test_the_signature_holds_theirs():
    ours = inspect.signature(flash_attention).parameters
    for name, parameter in inspect.signature(jax.nn.dot_product_attention).parameters.items():
        if name == "return_residual":
            continue
        assert ours[name].kind == parameter.kind
        assert ours[name].default == parameter.default


def test_a_row_that_sees_nothing_is_the_documented_difference(seed):
    inputs = make_inputs(Case(B=1, T=3, S=5, N=1, K=1), seed).arrays
    mask = np.array([True, False, True])[None, None, :, None]
    query, key, value = inputs["query"], inputs["key"], inputs["value"]
    ours = flash_attention(query, key, value, mask=mask)
    theirs = jax.nn.dot_product_attention(query, key, value, mask=jnp.asarray(mask))
    np.testing.assert_array_equal(ours[0, 1], np.zeros((1, 32)))
    np.testing.assert_allclose(theirs[0, 1, 0], value[0, :, 0].mean(0), atol=1e-6)
    np.testing.assert_allclose(ours[:, ::2], theirs[:, ::2], rtol=0, atol=3e-6)
