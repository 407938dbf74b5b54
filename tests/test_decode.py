"""Decoding gives what attention gives, however keys are split, and wherever they lie."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from implementations import INTERPRET, SMALL_BLOCKS, name_of

from pallas_flash import flash_decode_with_lse
from pallas_flash.backends.triton import TritonBackend
from pallas_flash.backends.triton.config import Config
from pallas_flash.backends.triton.decode_config import DecodeConfig
from pallas_flash.spec import AttentionOutput
from pallas_flash.testing import Case, Inputs, Truth, make_inputs

IS_GPU = jax.default_backend() == "gpu"


def decoding(lengths: tuple[int, ...], *, T: int = 1, **options) -> Case:
    """The attention that decoding rows of these lengths is."""
    options = {"spread": 2.0, "S": 200, **options}
    return Case(
        B=len(lengths),
        T=T,
        is_causal=True,
        query_offset=tuple(length - T for length in lengths),
        key_value_seq_lengths=lengths,
        **options,
    )


def decode(inputs: Inputs, implementation, **changes) -> AttentionOutput:
    """`flash_decode_with_lse` of a call, with NaN past the lengths and other arguments."""
    arrays = dict(inputs.arrays)
    lengths = arrays.pop("key_value_seq_lengths")
    del arrays["query_offset"]
    for name in ("key", "value"):
        cache = arrays.pop(name).copy()
        for row, length in enumerate(lengths):
            cache[row, length:] = np.nan
        arrays[f"{name}_cache"] = cache
    options = {name: x for name, x in inputs.options.items() if name != "is_causal"}
    arguments = {**arrays, **options, "lengths": lengths, **changes}
    return flash_decode_with_lse(**arguments, implementation=implementation, precision="highest")


def equal(x: AttentionOutput, y: AttentionOutput, rows=slice(None)) -> None:
    """Bit for bit."""
    for a, b in zip(x, y, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[rows], np.asarray(b)[rows])


@functools.cache
def truth(case: Case, seed: int) -> Truth:
    return Truth.of(make_inputs(case, seed), with_gradients=False)


def wrong(case: Case, seed: int, got: AttentionOutput) -> list[str]:
    results = {name: np.asarray(x, np.float64) for name, x in got._asdict().items()}
    return truth(case, seed).wrong(results)


# Groups of 1, 2, 3, 4, 7, 8 and 16, each head dim, each dtype, each number of tokens.
CASES = [
    decoding((200, 17, 0, 1), N=8, K=2, H=64, dtype="bfloat16"),
    decoding((200, 33), N=2, K=2, H=64),
    decoding((128, 90), T=2, N=4, K=2, H=80, dtype="bfloat16"),
    decoding((199, 64), N=3, K=1, H=96, dtype="float16"),
    decoding((200, 5, 2), T=5, N=8, K=2, H=128, dtype="bfloat16"),
    decoding((100, 16), T=16, N=7, K=1, H=64, dtype="bfloat16"),
    decoding((200, 31), N=8, K=1, H=256),
    decoding((97,), T=2, N=32, K=2, H=64, dtype="float16"),
    decoding((200, 40), T=16, N=16, K=1, H=32, dtype="bfloat16"),
    decoding((200, 40), N=4, K=2, H=48, Hv=80),
    decoding((200, 40), N=4, K=2, H=8, Hv=24, dtype="bfloat16"),
    decoding((200, 90, 3, 0), N=4, K=2, local_window_size=(40, 0)),
    decoding((200, 90, 3), T=5, N=4, K=2, local_window_size=(7, 3), dtype="bfloat16"),
    decoding((200, 90), N=4, K=2, local_window_size=(0, 0)),
    decoding((200, 90), N=4, K=2, logits_soft_cap=5.0),
    decoding((200, 90), T=2, N=4, K=2, logits_soft_cap=30.0, dtype="bfloat16"),
    decoding((200, 90, 0, 1), T=2, N=4, K=2, sinks=True),
    decoding((200, 90), N=4, K=2, sinks=True, local_window_size=(9, 9), logits_soft_cap=4.0),
    decoding((200, 90), N=4, K=2, scale=0.0),
    decoding((200, 90), N=4, K=2, scale=-0.25),
    decoding((200, 90), T=2, N=4, K=2, scale="traced"),
    decoding((200, 90), N=4, K=2, spread=40.0, dtype="bfloat16"),
]


# Where there is no GPU, Triton is refused, which other tests see.
ON_GPU = ["triton"] if IS_GPU else []


# Implementations vary fastest, so that they share one case's reference.
@pytest.mark.parametrize("implementation", ["xla", SMALL_BLOCKS, INTERPRET, *ON_GPU], ids=name_of)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_values(implementation, case, seed):
    assert wrong(case, seed, decode(make_inputs(case, seed), implementation)) == []


def kernels(splits: int, block_k: int = 16) -> TritonBackend:
    """That decode in so many parts, where there is a GPU on it."""
    cut = DecodeConfig(Config(16, block_k, 4, 2), splits)
    return TritonBackend(interpret=not IS_GPU, decode_config=cut)


SPLIT = decoding((300, 45, 16, 0), S=300, N=4, K=2, H=64, dtype="bfloat16")


# 19 blocks of keys. Pallas's interpreter takes seconds for each.
@pytest.mark.parametrize("splits", range(1, 33) if IS_GPU else (1, 2, 3, 7, 10, 19, 32))
def test_any_number_of_parts_gives_the_answer(splits, seed):
    assert wrong(SPLIT, seed, decode(make_inputs(SPLIT, seed), kernels(splits))) == []


# 256 parts of 256 entries are more than are merged at a time.
MANY = decoding((4096, 1000, 0), S=4096, N=2, K=1, H=16, Hv=256)


def test_more_parts_than_are_merged_at_a_time(seed):
    assert wrong(MANY, seed, decode(make_inputs(MANY, seed), kernels(256))) == []


EACH = pytest.mark.parametrize(
    "implementation",
    [SMALL_BLOCKS, kernels(1), kernels(4), *ON_GPU],
    ids=["xla", "whole", "parts", *ON_GPU],
)


@EACH
def test_a_rows_bits_are_its_own(implementation, seed):
    """Of one whose length is not changed, whatever the others' is."""
    inputs = make_inputs(SPLIT, seed)
    first = decode(inputs, implementation)
    assert np.asarray(first.out[3]).any() == 0
    assert np.isneginf(first.lse[3]).all()
    for lengths in ((300, 45, 16, 290), (300, 300, 16, 3), (300, 0, 16, 0)):
        arrays = inputs.arrays | {"key_value_seq_lengths": np.array(lengths, np.int32)}
        equal(decode(dataclasses.replace(inputs, arrays=arrays), implementation), first, [0, 2])


def paged(inputs: Inputs, page_size: int, seed: int) -> dict[str, np.ndarray]:
    """The same call's caches in pages, in any order among others that hold NaN."""
    rng = np.random.default_rng(seed)
    lengths = inputs.arrays["key_value_seq_lengths"]
    (batch, capacity), rest = inputs.arrays["key"].shape[:2], inputs.arrays["key"].shape[2:]
    pages_per_row = capacity // page_size
    pages = 2 * batch * pages_per_row - 1
    # The first is nobody's: who reads it in another's place reads NaN.
    table = 1 + rng.permutation(pages)[: batch * pages_per_row].reshape(batch, -1).astype(np.int32)
    caches = {}
    for name in ("key", "value"):
        x = inputs.arrays[name]
        cache = np.full((1 + pages, page_size, *rest), np.nan, x.dtype)
        cache[table] = x.reshape(batch, pages_per_row, page_size, *rest)
        caches[f"{name}_cache"] = cache
    # What is not needed may be anything.
    needed = -(-lengths // page_size)
    unneeded = np.arange(pages_per_row) >= needed[:, None]
    table[unneeded] = rng.choice([-1, -(2**31), 1 + pages, 2**31 - 1], unneeded.sum())
    return {**caches, "page_table": table}


PAGED = decoding((768, 100, 0, 33), S=768, T=2, N=4, K=2, H=32, dtype="bfloat16")


@EACH
@pytest.mark.parametrize("page_size", [8, 16, 32, 48, 64, 256, 384])
def test_pages_change_no_bit(implementation, page_size, seed):
    inputs = make_inputs(PAGED, seed)
    got = decode(inputs, implementation, **paged(inputs, page_size, seed))
    equal(got, decode(inputs, implementation))
    assert wrong(PAGED, seed, got) == []


@EACH
@pytest.mark.parametrize("page_size", [16, 64])
def test_pages_before_a_window_may_be_gone(implementation, page_size, seed):
    case = dataclasses.replace(PAGED, local_window_size=(70, 0))
    inputs = make_inputs(case, seed)
    arguments = paged(inputs, page_size, seed)
    first = inputs.arrays["key_value_seq_lengths"] - case.T - 70
    pages = np.arange(arguments["page_table"].shape[1])
    arguments["page_table"][(pages + 1) * page_size <= first[:, None]] = -1
    assert wrong(case, seed, decode(inputs, implementation, **arguments)) == []


@EACH
@pytest.mark.parametrize("missing", [-1, 10**6])
@pytest.mark.parametrize("page_size", [16, 64])
def test_a_page_that_is_needed_and_missing_gives_nan(implementation, page_size, missing, seed):
    inputs = make_inputs(PAGED, seed)
    arguments = paged(inputs, page_size, seed)
    expected = decode(inputs, implementation, **arguments)
    arguments["page_table"][0, 1] = missing
    got = decode(inputs, implementation, **arguments)
    assert np.isnan(np.asarray(got.out[0], np.float32)).all()
    assert np.isnan(got.lse[0]).all()
    equal(got, expected, slice(1, None))


@EACH
def test_a_missing_page_is_nothing_to_tokens_before_it(implementation, seed):
    case = dataclasses.replace(PAGED, T=5, query_offset=(61, 95, -5, 28))
    case = dataclasses.replace(case, key_value_seq_lengths=(66, 100, 0, 33))
    inputs = make_inputs(case, seed)
    arguments = paged(inputs, 64, seed)
    expected = decode(inputs, implementation, **arguments)
    # It would hold positions 64 and 65, which are those of the last two tokens.
    arguments["page_table"][0, 1] = -1
    got = decode(inputs, implementation, **arguments)
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_array_equal(x[0, :3], y[0, :3])
        assert np.isnan(np.asarray(x[0, 3:], np.float32)).all()
    equal(got, expected, slice(1, None))


@EACH
def test_a_length_that_is_none_gives_nan(implementation, seed):
    inputs = make_inputs(SPLIT, seed)
    expected = decode(inputs, implementation)
    got = decode(inputs, implementation, lengths=jnp.array([300, 301, 16, -5], jnp.int32))
    for row in (1, 3):
        assert np.isnan(np.asarray(got.out[row], np.float32)).all()
        assert np.isnan(got.lse[row]).all()
    equal(got, expected, [0, 2])
