"""Rotary position embedding beside complex numbers, and its scalings pair by pair."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash.flax import LinearScaling, Llama3Scaling, RotaryEmbedding, YarnScaling
from pallas_flash.testing import error

H = 16
FLOAT32 = float(jnp.finfo(jnp.float32).eps)

LLAMA3 = Llama3Scaling(
    factor=5.0, low_frequency_factor=2.0, high_frequency_factor=9.0, original_length=3000
)
YARN = YarnScaling(factor=8.0, original_length=2048, fast_turns=20.0, slow_turns=2.0)


def plain(base: float, head_dim: int) -> list[float]:
    return [base ** (-2 * i / head_dim) for i in range(head_dim // 2)]


def linear(scaling: LinearScaling, base: float, head_dim: int) -> list[float]:
    return [frequency / scaling.factor for frequency in plain(base, head_dim)]


def llama3(scaling: Llama3Scaling, base: float, head_dim: int) -> list[float]:
    """Of the length of a pair's wave, as in Meta's code."""
    longest = scaling.original_length / scaling.low_frequency_factor
    shortest = scaling.original_length / scaling.high_frequency_factor
    frequencies = []
    for frequency in plain(base, head_dim):
        wave = 2 * math.pi / frequency
        smooth = scaling.original_length / wave - scaling.low_frequency_factor
        smooth /= scaling.high_frequency_factor - scaling.low_frequency_factor
        if wave > longest:
            frequency /= scaling.factor
        elif wave >= shortest:
            frequency = (1 - smooth) * frequency / scaling.factor + smooth * frequency
        frequencies.append(frequency)
    return frequencies


def yarn(scaling: YarnScaling, base: float, head_dim: int) -> list[float]:
    """The paper's ramp between the pairs that turn so often in the original length."""

    def pair(turns: float) -> float:
        wave = scaling.original_length / turns
        return head_dim / 2 * math.log(wave / (2 * math.pi)) / math.log(base)

    low, high = math.floor(pair(scaling.fast_turns)), math.ceil(pair(scaling.slow_turns))
    frequencies = []
    for i, frequency in enumerate(plain(base, head_dim)):
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        frequencies.append(ramp * frequency / scaling.factor + (1 - ramp) * frequency)
    return frequencies


# The embedding, its frequencies by the definition, and how far it stretches the heads.
CASES = {
    "plain": (RotaryEmbedding(), plain(1e4, H), 1.0),
    "base": (RotaryEmbedding(base=250.0), plain(250.0, H), 1.0),
    "linear": (
        RotaryEmbedding(base=500.0, scaling=LinearScaling(2.5)),
        linear(LinearScaling(2.5), 500.0, H),
        1.0,
    ),
    "llama3": (RotaryEmbedding(base=5e3, scaling=LLAMA3), llama3(LLAMA3, 5e3, H), 1.0),
    "yarn": (
        RotaryEmbedding(base=1e4, scaling=YARN),
        yarn(YARN, 1e4, H),
        0.1 * math.log(8) + 1,
    ),
    "yarn, attention factor": (
        RotaryEmbedding(base=1e4, scaling=dataclasses.replace(YARN, attention_factor=0.75)),
        yarn(YARN, 1e4, H),
        0.75,
    ),
    # The ramp ends beyond the last pair.
    "yarn, base": (
        RotaryEmbedding(base=100.0, scaling=YARN),
        yarn(YARN, 100.0, H),
        0.1 * math.log(8) + 1,
    ),
    # Stretches are for longer contexts only.
    "yarn, shorter": (
        RotaryEmbedding(base=1e4, scaling=dataclasses.replace(YARN, factor=0.5)),
        yarn(dataclasses.replace(YARN, factor=0.5), 1e4, H),
        1.0,
    ),
}
each_case = pytest.mark.parametrize(
    ("embedding", "frequencies", "stretch"), CASES.values(), ids=CASES
)


def normal(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
@each_case
def test_pairs_turn_as_complex_numbers(embedding, frequencies, stretch, batch, rng):
    heads = normal(rng, *batch, 5, 3, H)
    positions = rng.integers(-50, 4000, (*batch, 5)).astype(np.int32)
    angles = positions[..., None, None] * np.array(frequencies)
    halves = np.asarray(heads, np.float64).reshape(*heads.shape[:-1], 2, H // 2)
    turned = stretch * (halves[..., 0, :] + 1j * halves[..., 1, :]) * np.exp(1j * angles)
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    got = np.asarray(embedding(heads, jnp.asarray(positions)), np.float64)
    # An angle is off by a rounding of the frequency and one of the product; and a few of the sum.
    lengths = np.tile(np.abs(turned), 2)
    assert (np.abs(got - expected) <= FLOAT32 * (np.tile(np.abs(angles), 2) + 4) * lengths).all()


@pytest.mark.parametrize("name", ["llama3", "yarn"])
def test_the_cases_have_pairs_of_each_sort(name):
    """Kept, slowed and in between: a ramp that had only one of them would hide its errors."""
    embedding, frequencies, _ = CASES[name]
    ratios, slowed = np.array(frequencies) / plain(embedding.base, H), 1 / embedding.scaling.factor
    assert ratios[0] == pytest.approx(1)
    assert ratios[-1] == pytest.approx(slowed)
    assert np.any((ratios < 0.99) & (ratios > slowed + 0.01))


# What Hugging Face's transformers 5.24 gives for the constants of released models.
KNOWN = {
    "Llama-3.1": (
        RotaryEmbedding(base=500000.0, scaling=Llama3Scaling()),
        {0: 1.0, 20: 0.016560440883040428, 30: 0.0013718936825171113, 34: 0.0001785077911335975}
        | {40: 3.428102354519069e-05, 63: 3.068925877869333e-07},
        1.0,
    ),
    "Qwen3, YaRN": (
        RotaryEmbedding(base=1e6, scaling=YarnScaling(factor=4.0, original_length=32768)),
        {0: 1.0, 20: 0.01333521492779255, 30: 0.0010643609566614032, 34: 0.00033424055436626077}
        | {40: 4.4456985051510856e-05, 63: 3.102344408034696e-07},
        1.138629436111989,
    ),
}


@pytest.mark.parametrize(("embedding", "known", "stretch"), KNOWN.values(), ids=KNOWN)
def test_frequencies_of_released_models(embedding, known, stretch):
    frequencies, factor = embedding.frequencies(128)
    assert frequencies.shape == (64,)
    assert frequencies.dtype == np.float32
    # Those are float32 from the power on.
    np.testing.assert_allclose([frequencies[i] for i in known], list(known.values()), rtol=1e-6)
    assert factor == pytest.approx(stretch, rel=1e-15)


def test_only_the_distance_matters(rng):
    query, key = normal(rng, 1, 1, 4, H), normal(rng, 1, 1, 4, H)
    embedding = RotaryEmbedding(base=250.0, scaling=LinearScaling(2.0))

    def products(query_position: int, key_position: int) -> np.ndarray:
        turned = [
            embedding(x, jnp.full((1, 1), position, jnp.int32))
            for x, position in ((query, query_position), (key, key_position))
        ]
        return np.asarray(jnp.sum(turned[0] * turned[1], axis=-1), np.float64)

    near = products(7, 3)
    # Angles of 500 are off by roundings of that.
    assert error(products(1004, 1000), near) <= 4 * 500 * FLOAT32
    assert error(products(8, 3), near) > 0.01


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_are_rounded_once_at_the_end(dtype, rng):
    heads = normal(rng, 2, 5, 3, H).astype(dtype)
    positions = jnp.asarray(rng.integers(0, 4000, (2, 5)), jnp.int32)
    for embedding, _, _ in CASES.values():
        got = embedding(heads, positions)
        expected = embedding(heads.astype(jnp.float32), positions)
        assert expected.dtype == jnp.float32
        assert got.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(got, expected.astype(dtype))


@dataclasses.dataclass(frozen=True)
class Reversed:
    """A scaling that somebody else wrote."""

    def scaled(self, frequencies, base):
        assert base == 250.0
        return frequencies[::-1], 2.0


def test_a_scaling_of_ones_own(rng):
    heads, positions = normal(rng, 5, 3, H), jnp.arange(5, dtype=jnp.int32)
    frequencies, factor = RotaryEmbedding(base=250.0, scaling=Reversed()).frequencies(H)
    np.testing.assert_array_equal(frequencies[::-1], RotaryEmbedding(base=250.0).frequencies(H)[0])
    assert factor == 2.0
    got = RotaryEmbedding(base=250.0, scaling=Reversed())(heads[:1], positions[:1])
    np.testing.assert_array_equal(got, 2 * heads[:1])


def test_equal_settings_are_equal():
    scalings = [
        LinearScaling(2.0),
        Llama3Scaling(factor=2.0),
        YarnScaling(factor=2.0, original_length=64),
    ]
    for scaling in scalings:
        one = RotaryEmbedding(base=1e6, scaling=scaling)
        other = RotaryEmbedding(base=10**6, scaling=dataclasses.replace(scaling))
        assert one == other
        assert hash(one) == hash(other)
    embeddings = [RotaryEmbedding(), *(RotaryEmbedding(scaling=scaling) for scaling in scalings)]
    assert len(set(embeddings)) == 4


NOT_POSITIVE = [0, -1.0, math.inf, math.nan, True, "2", None, np.array(2.0)]
VALID = {
    RotaryEmbedding: {"base": 1e4},
    LinearScaling: {"factor": 2.0},
    Llama3Scaling: dataclasses.asdict(Llama3Scaling()),
    YarnScaling: {
        **dataclasses.asdict(YarnScaling(factor=2.0, original_length=64)),
        "attention_factor": 1.0,
    },
}


@pytest.mark.parametrize(
    ("kind", "name", "x"),
    [
        (kind, name, x)
        for kind, valid in VALID.items()
        for name in valid
        for x in NOT_POSITIVE
        if not (name == "attention_factor" and x is None)
    ],
)
def test_every_field_is_a_finite_number_above_0(kind, name, x):
    with pytest.raises(ValueError, match=f"^{name}: expected a finite number above 0, got") as e:
        kind(**VALID[kind] | {name: x})
    assert str(e.value).endswith(f", got {x!r}")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RotaryEmbedding(base=1), "base: expected a number above 1, got 1"),
        (
            lambda: RotaryEmbedding(scaling="linear"),
            "scaling: expected None or a RotaryScaling, got 'linear'",
        ),
        (
            lambda: RotaryEmbedding(scaling=LinearScaling),
            "scaling: expected None or a RotaryScaling, got <class '",
        ),
        (
            lambda: Llama3Scaling(low_frequency_factor=4.0),
            "high_frequency_factor: expected more than low_frequency_factor = 4.0, got 4.0",
        ),
        (
            lambda: YarnScaling(factor=2.0, original_length=64, fast_turns=1),
            "fast_turns: expected more than slow_turns = 1.0, got 1",
        ),
        (
            lambda: RotaryEmbedding()(jnp.zeros((4, 2, 7)), jnp.arange(4)),
            "head_dim: expected an even int, for pairs that turn, got 7",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(make, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        make()
