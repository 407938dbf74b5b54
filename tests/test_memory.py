"""Memory is linear in the lengths, forward and backward, and emptied blocks take no time."""

import functools

import jax
import jax.numpy as jnp
import pytest
from implementations import draw, runnable

from pallas_flash import backends, flash_attention
from pallas_flash.backends.xla import XlaBackend
from pallas_flash.backends.xla.tile import Call
from pallas_flash.reference import reference_attention
from pallas_flash.spec import AttentionSpec, Operands, Residuals


def dense(query, key, value, is_causal):
    return reference_attention(query, key, value, is_causal=is_causal).out


def blockwise(query, key, value, is_causal):
    return flash_attention(query, key, value, is_causal=is_causal, implementation="xla")


def temporary_bytes(attention, length: int, is_causal: bool, is_differentiated: bool) -> int:
    """What a compiled call allocates beyond its arguments and results."""

    def call(query, key, value):
        return attention(query, key, value, is_causal=is_causal)

    def forward_and_backward(query, key, value, dout):
        out, vjp = jax.vjp(call, query, key, value)
        return out, vjp(dout)

    query = jax.ShapeDtypeStruct((1, length, 8, 64), jnp.float32)
    key = value = jax.ShapeDtypeStruct((1, length, 2, 64), jnp.float32)
    if is_differentiated:
        compiled = jax.jit(forward_and_backward).lower(query, key, value, query).compile()
    else:
        compiled = jax.jit(call).lower(query, key, value).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("is_differentiated", [False, True], ids=["forward", "and-backward"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_temporaries_are_linear_in_the_length(is_causal, is_differentiated):
    short, long = (
        temporary_bytes(blockwise, length, is_causal, is_differentiated) for length in (2048, 8192)
    )
    assert long <= 4 * 1.3 * short
    # Not by being large at the short length: one matrix of logits there has 134 MB.
    assert short < 20e6


def test_dense_attention_is_not():
    short, long = (temporary_bytes(dense, length, True, False) for length in (2048, 8192))
    assert long > 15 * short


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_kernels_allocate_nothing_but_results(is_causal):
    inputs = draw(0, "bfloat16", B=2, T=1000, N=8, K=2, H=96, is_causal=is_causal)
    runnable("triton", inputs)
    spec, operands = inputs.spec_and_operands()
    backend = backends.load("triton")

    def forward(operands, *, with_statistics):
        return backend.forward(spec, operands, with_lse=False, with_statistics=with_statistics)

    def backward(residuals, dout):
        return backend.backward(spec, residuals, dout, None)

    def temporaries(function, *args):
        compiled = jax.jit(function).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    for with_statistics in (False, True):
        assert (
            temporaries(functools.partial(forward, with_statistics=with_statistics), operands) == 0
        )
    result = forward(operands, with_statistics=True)
    residuals = Residuals(operands, result.out, result.m, result.log_l)
    delta = result.m.nbytes
    assert temporaries(backward, residuals, jnp.asarray(inputs.dout)) <= delta + 1024


@pytest.mark.parametrize(
    ("options", "lengths", "expected"),
    [
        ({}, {}, [(0, 4)] * 4),
        ({"is_causal": True}, {}, [(0, 1), (0, 2), (0, 3), (0, 4)]),
        ({"local_window_size": (16, 0)}, {}, [(0, 1), (0, 2), (1, 3), (2, 4)]),
        ({}, {"key_value_seq_lengths": (17, 3)}, [(0, 2)] * 4),
        ({}, {"key_value_seq_lengths": (0, 0)}, [(0, 0)] * 4),
        ({"is_causal": True}, {"query_offset": (16, -16)}, [(0, 2), (0, 3), (0, 4), (0, 4)]),
        ({"is_causal": True}, {"query_offset": (-99, -64)}, [(0, 0)] * 4),
        ({}, {"query_seq_lengths": (16, 20)}, [(0, 4), (0, 4), (0, 0), (0, 0)]),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_only_the_blocks_that_are_needed_are_visited(options, lengths, expected):
    query = jnp.zeros((2, 64, 1, 8), jnp.float32)
    arrays = {name: jnp.array(row, jnp.int32) for name, row in lengths.items()}
    operands = Operands(query, query, query, **arrays)
    call = Call.of(AttentionSpec(**options), operands, 16, 16)
    visited = [tuple(map(int, call.key_blocks(jnp.int32(i)))) for i in range(4)]
    empty_as_zero = [(first, last) if first < last else (0, 0) for first, last in visited]
    assert empty_as_zero == expected


@pytest.mark.parametrize("field", ["block_q", "block_k"])
@pytest.mark.parametrize("size", [0, -1, 2.5, True])
def test_block_sizes_validate_themselves(field, size):
    with pytest.raises(ValueError, match=rf"{field}: expected .* got {size}"):
        XlaBackend(**{field: size})
