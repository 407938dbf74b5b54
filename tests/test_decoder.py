"""The example decoder itself, on small random parameters: its verbs agree with one another.

And JAX's own attention behind our signatures, which it is compared with.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax_attention
import numpy as np
import pytest
from decoder import Caches, Decoder, DecoderConfig, Layer
from flax import nnx
from flax_modules import QUICK

from pallas_flash import flash_attention, flash_decode
from pallas_flash.flax import AttentionConfig, RotaryEmbedding
from pallas_flash.testing import error

V, T = 32, 28
# Of the prompts of a batch.
PROMPTS = np.array([9, 5], np.int32)

LLAMA = DecoderConfig(
    vocabulary_size=V,
    context_length=64,
    num_layers=2,
    feed_forward_size=24,
    rms_epsilon=1e-5,
    attention=AttentionConfig(
        features=16,
        num_query_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        rotary=RotaryEmbedding(),
    ),
    has_tied_embeddings=True,
)
# Heads as wide as they like, with norms; and windows, as some of its kind have.
QWEN3 = dataclasses.replace(
    LLAMA,
    attention=dataclasses.replace(LLAMA.attention, head_dim=8, norm_epsilon=1e-6, use_bias=True),
    has_tied_embeddings=False,
    windows=(None, (6, 0)),
)

# Both sides sum the same float32 products in other orders, in each of a few layers.
TOLERANCE = 1e-5

either_shape = pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=["llama", "qwen3"])
either_run = pytest.mark.parametrize("is_scanned", [False, True], ids=["unrolled", "scanned"])


def ints(*numbers: int) -> jax.Array:
    return jnp.array(numbers, jnp.int32)


@functools.cache
def decoder_of(config: DecoderConfig, seed: int) -> Decoder:
    """Random parameters: of norms and biases too, which are made of ones and zeros."""

    def make(key: jax.Array) -> Decoder:
        leaves, structure = jax.tree.flatten(Decoder(config, rngs=nnx.Rngs(key)))
        keys = jax.random.split(key, len(leaves))
        noise = [0.2 * jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=True)]
        return jax.tree.unflatten(structure, [x + y for x, y in zip(leaves, noise, strict=True)])

    return run(make, jax.random.key(seed))


def scanned(decoder: Decoder) -> Decoder:
    """The same parameters, of all layers in one array."""
    config = dataclasses.replace(decoder.config, is_scanned=True)
    other = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    for name in ("embedding", "output_norm", "unembedding"):
        if hasattr(decoder, name):
            setattr(other, name, getattr(decoder, name))
    other.layers = stacked(decoder)
    return other


def stacked(decoder: Decoder) -> Layer:
    """All layers of one that does not scan, or of its gradient, as those of one that does."""
    return jax.tree.map(lambda *x: jnp.stack(x), *decoder.layers)


def tokens_of(rng: np.random.Generator, length: int = T) -> jax.Array:
    return jnp.asarray(rng.integers(V, size=(2, length)), jnp.int32)


def run(function: Callable, *arguments: object) -> Any:
    return jax.jit(function, compiler_options=QUICK)(*arguments)


def assert_close(got: jax.Array, expected: jax.Array) -> None:
    assert error(np.asarray(got), np.asarray(expected)) < TOLERANCE


@functools.cache
def whole(config: DecoderConfig, seed: int) -> tuple[Decoder, jax.Array, jax.Array]:
    """A decoder, two texts, and what one call gives for them."""
    decoder, tokens = decoder_of(config, seed), tokens_of(np.random.default_rng(seed))
    return decoder, tokens, run(lambda decoder: decoder(tokens), decoder)


def in_steps(decoder: Decoder, tokens: jax.Array) -> tuple[jax.Array, Caches]:
    """Hidden states of all tokens, and caches: prompts, one more token each, and a chunk.

    The second row gets fewer tokens, and its states end in zeros.
    """
    rows = jnp.arange(2)[:, None]
    hidden = jnp.zeros((*tokens.shape, decoder.config.attention.features))

    def put(hidden: jax.Array, part: jax.Array, starts: jax.Array, counts: jax.Array) -> jax.Array:
        positions = jnp.arange(part.shape[1], dtype=jnp.int32)[None]
        here = jnp.where(positions < counts[:, None], starts[:, None] + positions, T)
        return hidden.at[rows, here].set(part, mode="drop")

    lengths = jnp.asarray(PROMPTS)
    part, caches = decoder.prefill(tokens[:, : PROMPTS.max()], lengths, capacity=T)
    hidden = put(hidden, part, jnp.zeros_like(lengths), lengths)
    for counts in (None, ints(T - 10, 3)):
        starts, width = caches.lengths, 1 if counts is None else T - 10
        positions = jnp.minimum(starts[:, None] + jnp.arange(width, dtype=jnp.int32)[None], T - 1)
        part, caches = decoder.extend(tokens[rows, positions], caches, counts)
        hidden = put(hidden, part, starts, ints(1, 1) if counts is None else counts)
    return hidden, caches


@pytest.mark.parametrize(
    ("config", "is_scanned"),
    [(LLAMA, False), (QWEN3, False), (LLAMA, True)],
    ids=["llama", "qwen3", "scanned"],
)
def test_steps_with_caches_give_what_one_call_gives(config, is_scanned, seed):
    decoder, tokens, expected = whole(config, seed)
    decoder = scanned(decoder) if is_scanned else decoder
    hidden, caches = run(lambda decoder: in_steps(decoder, tokens), decoder)
    assert caches.lengths.tolist() == [T, 9]
    assert_close(hidden[0], expected[0])
    assert_close(hidden[1, :9], expected[1, :9])


@either_run
def test_to_extend_empty_caches_is_a_prefill(is_scanned, seed):
    decoder, tokens, expected = whole(LLAMA, seed)
    decoder = scanned(decoder) if is_scanned else decoder
    lengths = ints(20, T)
    hidden, caches = run(lambda x: x.prefill(tokens, lengths, capacity=T + 4), decoder)
    same, extended = run(lambda x: x.extend(tokens, x.empty_caches(2, T + 4), lengths), decoder)
    assert caches.lengths.tolist() == extended.lengths.tolist() == [20, T]
    for row, length in enumerate((20, T)):
        for states in (hidden, same):
            assert_close(states[row, :length], expected[row, :length])
        pairs = zip(jax.tree.leaves(caches.pairs), jax.tree.leaves(extended.pairs), strict=True)
        for x, y in pairs:
            stretch = (row, slice(length))
            stretch = (slice(None), *stretch) if is_scanned else stretch
            assert_close(x[stretch], y[stretch])


@either_shape
def test_packed_and_padded_texts_give_what_each_alone_gives(config, rng, seed):
    decoder, tokens = decoder_of(config, seed), tokens_of(rng)
    ids = jnp.asarray(np.repeat([[0, 1]], [10, T - 10], axis=1), jnp.int32)
    positions = jnp.concatenate([jnp.arange(10), jnp.arange(T - 10)]).astype(jnp.int32)
    arrays = [jnp.broadcast_to(x, (2, T)) for x in (ids, positions[None])]
    packed = run(
        lambda decoder: decoder(tokens, segment_ids=arrays[0], positions=arrays[1]), decoder
    )
    padded = run(lambda decoder: decoder(tokens, lengths=jnp.array([10, T], jnp.int32)), decoder)
    first, second = (
        run(lambda decoder, x: decoder(x), decoder, x) for x in (tokens[:, :10], tokens[:, 10:])
    )
    assert_close(packed[:, :10], first)
    assert_close(packed[:, 10:], second)
    assert_close(padded[:1, :10], first[:1])


def test_a_scan_that_computes_layers_anew_has_the_same_gradients(rng, seed):
    decoder, tokens = decoder_of(LLAMA, seed), tokens_of(rng)

    def gradient(decoder, remat):
        def loss(decoder):
            return jnp.mean(jnp.square(decoder.logits(decoder(tokens, remat=remat))))

        assert ("remat2[" in str(jax.make_jaxpr(loss)(decoder))) == (remat is not None)
        return run(jax.grad(loss), decoder)

    expected = gradient(decoder, None)
    got = gradient(scanned(decoder), jax.checkpoint)
    pairs = [(got.layers, stacked(expected)), (got.embedding, expected.embedding)]
    for x, y in zip(*(jax.tree.leaves(side) for side in zip(*pairs, strict=True)), strict=True):
        assert_close(x, y)


@either_shape
def test_logits_are_of_the_embedding_or_of_a_matrix_of_their_own(config, seed, rng):
    decoder = decoder_of(config, seed)
    hidden = rng.standard_normal((2, 3, 16)).astype(np.float32)
    if config.has_tied_embeddings:
        assert not hasattr(decoder, "unembedding")
        matrix = np.asarray(decoder.embedding.embedding[...]).T
    else:
        matrix = np.asarray(decoder.unembedding.kernel[...])
    expected = (hidden.astype(np.float64) @ matrix.astype(np.float64)).astype(np.float32)
    assert_close(decoder.logits(jnp.asarray(hidden)), expected)


@either_run
def test_with_attention_keeps_the_parameters(is_scanned, seed):
    decoder = decoder_of(LLAMA if is_scanned else QWEN3, seed)
    decoder = scanned(decoder) if is_scanned else decoder
    calls = []

    def noted(function):
        def call(*arrays, **options):
            calls.append((function, options["local_window_size"], options["implementation"]))
            return function(*arrays, **options)

        return call

    other = decoder.with_attention(
        noted(flash_attention), noted(flash_decode), implementation="xla"
    )
    leaves = [jax.tree.leaves(x) for x in (decoder, other)]
    assert all(x is y for x, y in zip(*leaves, strict=True))
    tokens = jnp.zeros((2, 1), jnp.int32)
    jax.eval_shape(lambda: other.extend(tokens, other.prefill(tokens, capacity=T)[1]))
    windows = [None] if is_scanned else [None, (6, 0)]
    assert calls == [
        (function, window, "xla")
        for function in (flash_attention, flash_decode)
        for window in windows
    ]
    # One that attends as before shares its compiled programs.
    structures = {jax.tree.structure(x) for x in (decoder, other.with_attention())}
    assert len(structures) == 1


@either_run
def test_caches_share_their_lengths_and_are_written_in_place(is_scanned, seed):
    decoder = decoder_of(LLAMA, seed)
    decoder = scanned(decoder) if is_scanned else decoder
    caches = decoder.empty_caches(2, T)
    shapes = sorted(x.shape for x in jax.tree.leaves(caches))
    pair = [(2, 2, T, 2, 4)] * 2 if is_scanned else [(2, T, 2, 4)] * 4
    assert shapes == [(2,), *pair]
    step = jax.jit(lambda decoder, caches, tokens: decoder.extend(tokens, caches), donate_argnums=1)
    compiled = step.lower(decoder, caches, jnp.zeros((2, 1), jnp.int32)).compile(QUICK)
    buffers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(caches)]
    _, extended = compiled(decoder, caches, jnp.zeros((2, 1), jnp.int32))
    assert extended.lengths.tolist() == [1, 1]
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(extended)] == buffers


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocabulary_size": 0}, "vocabulary_size must be positive, got 0"),
        ({"context_length": -1}, "context_length must be positive, got -1"),
        ({"num_layers": 0}, "num_layers must be positive, got 0"),
        ({"feed_forward_size": 0}, "feed_forward_size must be positive, got 0"),
        ({"rms_epsilon": 0.0}, "rms_epsilon must be positive, got 0.0"),
        ({"rms_epsilon": float("nan")}, "rms_epsilon must be positive, got nan"),
        ({"windows": (None,)}, r"windows must be one for each of 2 layers, got \(None,\)"),
        ({"windows": (None, -1)}, "local_window_size: .*-1"),
        ({"windows": (4, 4), "is_scanned": True}, r"all alike, got windows \(4, 4\)"),
    ],
)
def test_a_config_names_the_bad_value(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(LLAMA, **fields)


def heads_of(rng: np.random.Generator, length: int, key_length: int) -> list[jax.Array]:
    """A query, a key and a value, grouped."""
    shapes = [(2, length, 4, 8), (2, key_length, 2, 8), (2, key_length, 2, 8)]
    return [jnp.asarray(rng.standard_normal(shape), np.float32) for shape in shapes]


OFFSETS = {"query_offset": ints(8, 3)}
LENGTHS = {"query_seq_lengths": ints(9, 4)}
KEY_LENGTHS = {"key_value_seq_lengths": ints(20, 7)}
SEGMENTS = {"query_segment_ids": jnp.repeat(jnp.array([[0, 1, 2], [5, 5, 0]]), 4, axis=1)}


@pytest.mark.parametrize(
    ("key_length", "options"),
    [
        (12, {}),
        (12, {"is_causal": True, "scale": 0.3, "implementation": "xla", **LENGTHS}),
        (20, KEY_LENGTHS),
        (12, {"is_causal": True, "local_window_size": (3, 0)}),
        (12, {"local_window_size": 4}),
        (20, {"is_causal": True, **OFFSETS}),
        (20, {"is_causal": True, **OFFSETS, **LENGTHS, **KEY_LENGTHS}),
        (20, {"is_causal": True, "local_window_size": (3, 0), **OFFSETS}),
        (20, {"local_window_size": 4, **OFFSETS}),
        (12, {"is_causal": True, **SEGMENTS}),
        (12, {"local_window_size": (3, 1), "query_offset": ints(0, 1), **SEGMENTS}),
    ],
    ids=lambda x: "-".join(x) or "plain" if isinstance(x, dict) else str(x),
)
def test_attention_of_jax_gives_what_ours_gives(key_length, options, rng):
    heads = heads_of(rng, 12, key_length)
    got, expected = (
        run(lambda *heads, f=f: f(*heads, **options), *heads)
        for f in (jax_attention.attention, flash_attention)
    )
    assert_close(got, expected)


@pytest.mark.parametrize(
    "options", [{}, {"scale": 0.3, "implementation": "xla"}, {"local_window_size": (5, 0)}]
)
@pytest.mark.parametrize("length", [1, 3])
def test_decoding_of_jax_gives_what_ours_gives(length, options, rng):
    heads = heads_of(rng, length, 20)
    lengths = ints(20, 7)
    got, expected = (
        run(lambda *heads, f=f: f(*heads, lengths, **options), *heads)
        for f in (jax_attention.decode, flash_decode)
    )
    assert_close(got, expected)


@pytest.mark.parametrize(
    ("option", "x"),
    [
        ("logits_soft_cap", 5.0),
        ("sinks", jnp.zeros(4)),
        ("precision", "highest"),
        ("page_table", jnp.zeros((2, 1), jnp.int32)),
    ],
)
def test_attention_of_jax_names_what_it_has_not(option, x, rng):
    query, key, value = heads_of(rng, 1, 16)
    with pytest.raises(NotImplementedError, match=f"takes no {option}"):
        jax_attention.decode(query, key, value, ints(1, 1), **{option: x})
    if option != "page_table":
        with pytest.raises(NotImplementedError, match=f"takes no {option}"):
            jax_attention.attention(query, key, value, **{option: x})


def test_attention_of_jax_has_the_options_of_ours_or_refuses_them(rng):
    for function, ours, missing in (
        (jax_attention.attention, flash_attention, {"bias", "mask", "key_value_segment_ids"}),
        (jax_attention.decode, flash_decode, set()),
    ):
        names = [set(inspect.signature(f).parameters) for f in (function, ours)]
        assert names[1] - names[0] == missing
        for name in missing:
            with pytest.raises(TypeError, match=f"'{name}'"):
                function(*heads_of(rng, 1, 1), **{name: None})
