"""What flash attention is measured against: attention in three steps, and its first loop order."""

import functools
from collections.abc import Callable

import flash1
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import three_steps
from compiled import Kernel, compile_for, kernels, lower, needs_lowering, require_triton

from pallas_flash.backends.triton.config import Config
from pallas_flash.testing import Case, Inputs, Truth, make_inputs

CASES = [
    Case(T=1, S=1, H=16),
    # One block of keys, and one of queries.
    Case(T=70, S=16, is_causal=True),
    Case(T=13, S=70, is_causal=True),
    Case(T=64, S=64, N=4, K=2, dtype="float16"),
    Case(T=53, S=91, N=6, K=2, is_causal=True),
    Case(T=91, S=53, N=4, K=1, dtype="bfloat16", is_causal=True),
    # Sharp, so that the maximum changes from block to block; in several blocks as picked, too.
    Case(B=1, T=80, S=80, H=128, is_causal=True, spread=3.0),
    Case(B=1, T=33, S=257, H=256, spread=3.0),
]

# So small that short calls have several blocks both ways, and wider either way.
CONFIGS = {"tall": Config(32, 16, 4, 1), "wide": Config(16, 32, 4, 1)}

# Compute capability, and KiB of shared memory that a program may have.
CARDS = {"NVIDIA A100": ("8.0", 163), "NVIDIA H200": ("9.0", 227)}


@functools.cache
def call(case: Case, seed: int) -> tuple[Inputs, Truth]:
    """A case's arrays, and what comes of them."""
    inputs = make_inputs(case, seed)
    truth = Truth.of(inputs)
    return inputs, Truth({"out": truth.expected["out"]}, truth.budget)


def wrong(attention: Callable[..., jax.Array], case: Case, seed: int) -> list[str]:
    """What of the output is not within the budget, in words."""
    inputs, truth = call(case, seed)
    out = attention(**inputs.arrays, **inputs.options)
    assert out.dtype == case.dtype
    return truth.wrong({"out": np.asarray(out).astype(np.float64)})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_three_steps_are_attention(case, seed):
    assert not wrong(three_steps.attention, case, seed)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_first_order_is_attention(case, config, seed):
    attention = functools.partial(flash1.attention, interpret=True, config=CONFIGS[config])
    assert not wrong(attention, case, seed)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("case", CASES[-2:], ids=lambda case: case.id)
def test_the_first_order_is_attention_in_blocks_as_they_are_picked(case, seed):
    assert not wrong(functools.partial(flash1.attention, interpret=True), case, seed)


def shapes(case: Case) -> list[jax.ShapeDtypeStruct]:
    """Of query, key and value."""
    sizes = (case.B, case.T, case.N, case.H), *[(case.B, case.S, case.K, case.H)] * 2
    return [jax.ShapeDtypeStruct(shape, jnp.dtype(case.dtype)) for shape in sizes]


@pytest.mark.parametrize("is_causal", [False, True])
def test_three_steps_write_their_matrices(is_causal):
    case = Case(B=2, T=512, S=256, N=4, K=2)
    lowered = three_steps.attention.lower(*shapes(case), is_causal=is_causal)
    # A CPU would have written them anyway.
    assert lowered.as_text().count("optimization_barrier") == 2
    temporary = lowered.compile().memory_analysis().temp_size_in_bytes
    assert temporary >= case.B * case.N * case.T * case.S * 4


@pytest.mark.parametrize("head_dim", [8, 96, 512])
def test_the_first_order_names_the_head_dim_that_it_does_not_have(head_dim):
    with pytest.raises(NotImplementedError, match=rf"H: expected .*, got {head_dim}"):
        flash1.attention(*map(jnp.zeros_like, shapes(Case(H=head_dim))), interpret=True)


def lowered(case: Case, card: str) -> Kernel:
    """As it is timed: at default precision, which is TF32 for float32."""
    attention = functools.partial(flash1.attention, is_causal=case.is_causal)
    with jax.default_matmul_precision("default"):
        (kernel,) = kernels(lower(attention, *shapes(case), kind=card)).values()
    return kernel


@needs_lowering
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_first_order_lowers(dtype):
    for head_dim in (16, 32, 64, 128, 256):
        for length in (1, 999):
            case = Case(B=2, T=length, S=length, N=4, K=2, H=head_dim, dtype=dtype)
            assert lowered(case, "NVIDIA H200").grid == (2 * 4, 1, 1)


@needs_lowering
def test_what_is_written_is_read_behind_a_barrier():
    text = lowered(Case(T=1024, S=1024), "NVIDIA H200").text
    # Of the loop for the first block of keys and of that for the others: one before a block of
    # queries is written, and one behind the loop.
    assert text.count("gpu.barrier") == 2 * 2


@needs_lowering
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_first_order_fits(head_dim, dtype, card):
    require_triton()
    capability, room = CARDS[card]
    # An odd length has every branch.
    case = Case(T=4095, S=4095, H=head_dim, dtype=dtype, is_causal=True)
    compiled = compile_for(lowered(case, card), capability)
    assert compiled.shared_bytes <= 0.9 * 1024 * room
    assert compiled.spilled_bytes <= 256
