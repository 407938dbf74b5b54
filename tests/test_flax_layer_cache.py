"""`GroupedQueryAttention` with a cache gives what it gives without one."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax_layers import (
    ALL,
    BUDGET,
    ROTARY,
    D,
    H,
    K,
    config_of,
    layer_of,
    parameters,
    plain,
    wide,
)
from flax_modules import QUICK, lenient, normal
from implementations import INTERPRET

from pallas_flash import KVCache, PagedKVCache
from pallas_flash.flax import AttentionConfig
from pallas_flash.testing import error

B, L = 2, 43
PAGES, PAGE_SIZE, PAGES_PER_ROW = 7, 16, 3
CAPACITY = PAGES_PER_ROW * PAGE_SIZE

CONFIGS = {
    "rotary": config_of(rotary=ROTARY, use_bias=True),
    "window": config_of(**ALL | {"local_window_size": (9, 0)}),
}
# Of the kernels of attention, sinks are not yet among the options.
KERNELS = config_of(
    **ALL | {"local_window_size": (9, 0), "use_sinks": False, "implementation": INTERPRET}
)

both_caches = pytest.mark.parametrize(
    "cache_kind", [KVCache, PagedKVCache], ids=lambda kind: kind.__name__
)


@functools.lru_cache
def truth(config: AttentionConfig, seed: int) -> tuple[Any, np.ndarray, np.ndarray]:
    """Parameters, hidden states [B, L, D], and what a pass without a cache makes of them."""
    rng = np.random.default_rng(seed)
    params, hidden = parameters(config, rng), normal(rng, B, L, D)
    with jax.enable_x64(True), lenient():
        run = jax.jit(functools.partial(plain, config), compiler_options=QUICK)
        return params, np.asarray(hidden), np.asarray(run(wide(params), wide(hidden)))


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=QUICK)
def extend(kind, config, params, hidden, cache, counts=None):
    return layer_of(kind, config, params).extend(hidden, cache, counts)


def empty(cache_kind: type, rng: np.random.Generator, dtype: str = "float32") -> Any:
    if cache_kind is KVCache:
        return KVCache.empty(B, CAPACITY, K, H, dtype)
    table = rng.permutation(PAGES)[: B * PAGES_PER_ROW].reshape(B, PAGES_PER_ROW)
    return PagedKVCache.empty(table, PAGES, PAGE_SIZE, K, H, dtype)


def chunk_of(hidden: np.ndarray, starts: list[int], counts: list[int], length: int) -> np.ndarray:
    """Each row's next tokens, [B, length, D]; what is padding is NaN."""
    chunk = np.full((B, length, D), np.nan, np.float32)
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        chunk[row, :count] = hidden[row, start : start + count]
    return chunk


# Lengths of chunks, and how much of each is no padding: by the kernel for decoding and by that for
# prompts, and both with rows that get different numbers of tokens, or none.
CHUNKS = [(20, [20, 13]), (5, None), (7, [0, 6]), (1, None), (17, None)]


def assert_chunks(
    kind: str,
    config: AttentionConfig,
    cache: Any,
    chunks: list[tuple[int, list[int] | None]],
    seed: int,
) -> None:
    """Chunks from the first token on give what one pass gives, and padding what nothing gives."""
    params, hidden, expected = truth(dataclasses.replace(config, implementation=None), seed)
    nothing = np.asarray(params["out"]["bias"])
    lengths = [0] * B
    for length, counts in chunks:
        real = [length] * B if counts is None else counts
        chunk = chunk_of(hidden, lengths, real, length)
        given = None if counts is None else jnp.asarray(counts, jnp.int32)
        out, cache = extend(kind, config, params, chunk, cache, given)
        out = np.asarray(out, np.float64)
        for row, (start, count) in enumerate(zip(lengths, real, strict=True)):
            stop = start + count
            assert error(out[row, :count], expected[row, start:stop]) <= BUDGET
            np.testing.assert_array_equal(out[row, count:], np.tile(nothing, (length - count, 1)))
        lengths = [start + count for start, count in zip(lengths, real, strict=True)]
        assert cache.lengths.tolist() == lengths


@pytest.mark.parametrize(("name", "cache_kind"), [("window", KVCache), ("rotary", PagedKVCache)])
def test_chunks_give_what_one_pass_gives(name, cache_kind, rng, seed):
    assert_chunks("nnx", CONFIGS[name], empty(cache_kind, rng), CHUNKS, seed)


def test_chunks_in_linen(rng, seed):
    assert_chunks("linen", CONFIGS["window"], empty(PagedKVCache, rng), CHUNKS[:2], seed)


def test_chunks_by_the_kernels(rng, seed, on_cpu):
    assert_chunks("nnx", KERNELS, empty(PagedKVCache, rng), CHUNKS[:2], seed)


@pytest.mark.parametrize(("name", "kind"), [("window", "nnx"), ("rotary", "linen")])
def test_tokens_after_a_prompt_give_what_one_pass_gives(name, kind, seed):
    """A prefill of padded prompts, then a scan of steps, which carries the cache."""
    config, lengths, steps = CONFIGS[name], [20, 13], 6
    params, hidden, expected = truth(config, seed)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(params, prompts, lengths, tokens):
        layer = layer_of(kind, config, params)
        out, cache = layer.prefill(prompts, lengths, capacity=CAPACITY)

        def step(cache, token):
            out, cache = layer.extend(token[:, None], cache)
            return cache, out[:, 0]

        cache, outs = jax.lax.scan(step, cache, tokens)
        return out, outs, cache.lengths

    prompts = chunk_of(hidden, [0, 0], lengths, 20)
    tokens = chunk_of(hidden, lengths, [steps] * B, steps).swapaxes(0, 1)
    out, outs, after = run(params, prompts, jnp.asarray(lengths, jnp.int32), tokens)
    for row, length in enumerate(lengths):
        got = np.concatenate([out[row, :length], outs[:, row]]).astype(np.float64)
        assert error(got, expected[row, : length + steps]) <= BUDGET
        nothing = np.tile(params["out"]["bias"], (20 - length, 1))
        np.testing.assert_array_equal(out[row, length:], nothing)
    assert after.tolist() == [length + steps for length in lengths]


def filled(cache_kind: type, lengths: list[int], rng: np.random.Generator) -> Any:
    """A cache of random keys and values in all of its places."""
    cache = empty(cache_kind, rng)
    key, value = normal(rng, *cache.key.shape), normal(rng, *cache.key.shape)
    lengths = jnp.asarray(lengths, jnp.int32)
    return dataclasses.replace(cache, key=key, value=value, lengths=lengths)


# Of one step, of a chunk, and of one with padding.
each_form = pytest.mark.parametrize(("length", "counts"), [(1, None), (17, None), (7, [4, 7])])


@each_form
def test_pages_before_the_window_may_be_anybodys(length, counts, rng):
    """Nobody's, or of others who hold NaN there."""
    config = CONFIGS["window"]
    # The next token sees positions 16 on, of the second page.
    cache = filled(PagedKVCache, [25, 31], rng)
    behind = dataclasses.replace(cache, page_table=cache.page_table.at[0, 0].set(-1))
    page = cache.page_table[1, 0]
    behind = dataclasses.replace(
        behind, key=behind.key.at[page].set(jnp.nan), value=behind.value.at[page].set(jnp.nan)
    )
    arrays = (parameters(config, rng), normal(rng, B, length, D))
    counts = None if counts is None else jnp.asarray(counts, jnp.int32)
    expected, _ = extend("nnx", config, *arrays, cache.contiguous(), counts)
    got, _ = extend("nnx", config, *arrays, behind, counts)
    assert error(np.asarray(got, np.float64), np.asarray(expected, np.float64)) <= BUDGET


@each_form
@both_caches
def test_a_row_without_room_is_nan_inside_jit(cache_kind, length, counts, rng):
    """Or one that was already lost; the other row is as ever."""
    config = CONFIGS["rotary"]
    arrays = (parameters(config, rng), normal(rng, B, length, D))
    cache = filled(cache_kind, [20, 20], rng)
    counts = None if counts is None else jnp.asarray(counts, jnp.int32)
    expected, _ = extend("nnx", config, *arrays, cache, counts)
    assert np.isfinite(expected).all()
    for lost in (CAPACITY, CAPACITY + 1, -1):
        full = dataclasses.replace(cache, lengths=jnp.asarray([lost, 20], jnp.int32))
        got, after = extend("nnx", config, *arrays, full, counts)
        assert np.isnan(got[0]).all()
        np.testing.assert_array_equal(got[1], expected[1])
        assert not 0 <= after.lengths[0] <= CAPACITY


@each_form
def test_a_row_without_a_page_is_nan_inside_jit(length, counts, rng):
    config = CONFIGS["rotary"]
    arrays = (parameters(config, rng), normal(rng, B, length, D))
    cache = filled(PagedKVCache, [16, 20], rng)
    counts = None if counts is None else jnp.asarray(counts, jnp.int32)
    expected, _ = extend("nnx", config, *arrays, cache, counts)
    cache = dataclasses.replace(cache, page_table=cache.page_table.at[0, 1].set(-1))
    got, _ = extend("nnx", config, *arrays, cache, counts)
    is_token = np.arange(length) < (length if counts is None else counts[0])
    assert np.isnan(got[0, is_token]).all()
    np.testing.assert_array_equal(got[1], expected[1])


@both_caches
def test_counts_that_cannot_be_are_nan_inside_jit(cache_kind, rng):
    config = CONFIGS["rotary"]
    arrays = (parameters(config, rng), normal(rng, B, 7, D))
    cache = filled(cache_kind, [5, 20], rng)
    expected, _ = extend("nnx", config, *arrays, cache, jnp.asarray([7, 4], jnp.int32))
    for count in (8, -1):
        got, _ = extend("nnx", config, *arrays, cache, jnp.asarray([count, 4], jnp.int32))
        assert np.isnan(got[0]).all()
        np.testing.assert_array_equal(got[1], expected[1])


@both_caches
def test_what_does_not_fit_is_an_error_outside_jit(cache_kind, rng):
    config = config_of()
    layer, hidden = layer_of("nnx", config, parameters(config, rng)), normal(rng, B, 2, D)
    cache = filled(cache_kind, [CAPACITY - 1, 20], rng)
    with pytest.raises(ValueError, match=r"^key: expected at most 1 new positions for row 0"):
        layer.extend(hidden, cache)
    with pytest.raises(ValueError, match=r"^counts: expected 0 to 2 for row 1, got 3$"):
        layer.extend(hidden, cache, [1, 3])
    if cache_kind is PagedKVCache:
        cache = dataclasses.replace(cache, page_table=cache.page_table.at[1, 1].set(-1))
        with pytest.raises(ValueError, match=r"^cache\.page_table: expected a page of 0 to 6"):
            layer.extend(hidden, cache, [1, 2])


S = 9


@pytest.mark.parametrize(("kind", "length"), [("nnx", 1), ("linen", 4)])
def test_a_context_may_be_cached(kind, length, rng):
    """One token takes the kernel for decoding, unless lengths say that it may be padding."""
    config = config_of(
        is_causal=False, context_features=10, use_bias=True, norm_epsilon=0.01, use_sinks=True
    )
    params = parameters(config, rng)
    hidden, context = normal(rng, B, length, D), normal(rng, B, S, 10)
    context_lengths = np.array([S, 5], np.int32)
    # What is past them does not matter.
    context = context.at[1, 5:].set(jnp.nan)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(params, hidden, context, context_lengths, lengths):
        layer = layer_of(kind, config, params)
        cache = layer.context_cache(context, context_lengths)
        whole = layer.context_cache(context[:1])
        return {
            "lengths": layer(hidden, cache, lengths=lengths),
            "none": layer(hidden, cache),
            "whole": layer(hidden[:1], whole),
        }

    lengths = np.array([0, length], np.int32)
    got = run(params, hidden, context, context_lengths, lengths)
    with jax.enable_x64(True), lenient():
        arrays = wide((params, hidden, context.at[1, 5:].set(0)))
        call = jax.jit(functools.partial(plain, config), compiler_options=QUICK)
        padded, full = (
            call(*arrays, context_lengths=context_lengths, lengths=x)
            for x in (lengths, np.full_like(lengths, length))
        )
    for name, x in {"lengths": padded, "none": full, "whole": full[:1]}.items():
        assert error(np.asarray(got[name], np.float64), np.asarray(x)) <= BUDGET, name


@pytest.mark.parametrize("lengths", [None, [1, 1]], ids=["all", "lengths"])
@pytest.mark.parametrize("length", [1, 3])
def test_a_row_of_a_cached_context_that_is_lost_is_nan(length, lengths, rng):
    config = config_of(is_causal=False)
    params = parameters(config, rng)
    hidden, context = normal(rng, B, length, D), normal(rng, B, S, D)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(context_lengths):
        layer = layer_of("nnx", config, params)
        return layer(hidden, layer.context_cache(context, context_lengths), lengths=lengths)

    got = run(jnp.asarray([S + 1, S], jnp.int32))
    assert np.isnan(got[0]).all()
    assert np.isfinite(got[1]).all()


def test_a_cache_has_the_dtype_of_the_computation(rng):
    config = config_of(dtype="bfloat16", rotary=ROTARY)
    params, hidden = parameters(config, rng), normal(rng, B, 3, D)

    def run(params, hidden):
        layer = layer_of("nnx", config, params)
        out, cache = layer.prefill(hidden, capacity=8)
        return out, layer.extend(hidden, cache, jnp.asarray([1, 3], jnp.int32))

    out, (more, cache) = jax.eval_shape(run, params, hidden)
    assert {x.dtype.name for x in (out, more, cache.key, cache.value)} == {"bfloat16"}
    assert cache.lengths.dtype == jnp.int32
