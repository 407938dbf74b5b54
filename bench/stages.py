"""What a decoder is run for, as programs: a prefill, a step of training, a step of decoding.

Each takes what stays the same and what it replaces (which is donated), and gives the latter anew
and a result.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import jax_attention
import optax
from decoder import Caches, Decoder, DecoderConfig, Pair
from flax import nnx

import pallas_flash
from pallas_flash import flash_attention, flash_decode
from pallas_flash.flax import AttentionConfig, RotaryEmbedding

# A pytree of arrays.
Arrays = Any

# The parameters of a decoder, in the order of its pytree.
Leaves = list[jax.Array]


@dataclass(frozen=True)
class Attention:
    """Whose attention the decoder has, and what a layer's gradient keeps of its forward."""

    attention_fn: Callable[..., jax.Array]
    decode_fn: Callable[..., jax.Array]
    implementation: str | None
    policy: Callable[..., bool] | None = None

    @property
    def remat(self) -> Callable:
        """Of a layer."""
        return partial(jax.checkpoint, policy=self.policy)

    def decoder(self, config: DecoderConfig, rngs: nnx.Rngs) -> Decoder:
        """Random parameters, the same for all."""
        attention = replace(config.attention, implementation=self.implementation)
        return Decoder(
            replace(config, attention=attention),
            attention_fn=self.attention_fn,
            decode_fn=self.decode_fn,
            rngs=rngs,
        )


@dataclass(frozen=True)
class ToDecoder:
    """Makes parameters the decoder of a config and an attention."""

    config: DecoderConfig
    attention: Attention

    def __call__(self, leaves: Leaves) -> Decoder:
        abstract = nnx.eval_shape(lambda: self.attention.decoder(self.config, nnx.Rngs(0)))
        return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def attentions(ours: str) -> Mapping[str, Attention]:
    """Who is compared, by name; `ours` is the implementation of this library's."""
    theirs = {
        f"jax-{name}": Attention(jax_attention.attention, jax_attention.decode, name)
        for name in ("cudnn", "xla")
    }
    policy = jax.checkpoint_policies.save_only_these_names(
        pallas_flash.OUT_NAME, pallas_flash.LSE_NAME
    )
    return {
        f"ours-{ours}": Attention(flash_attention, flash_decode, ours),
        # The forward of attention is then not run again.
        f"ours-{ours}-kept": Attention(flash_attention, flash_decode, ours, policy),
        **theirs,
    }


def shape_of_qwen3_8b(dtype: str = "bfloat16") -> DecoderConfig:
    """Qwen3-8B's sizes, with layers that a scan runs."""
    attention = AttentionConfig(
        features=4096,
        num_query_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rotary=RotaryEmbedding(base=1e6),
        norm_epsilon=1e-6,
        dtype=dtype,
        param_dtype=dtype,
    )
    return DecoderConfig(
        vocabulary_size=151936,
        context_length=40960,
        num_layers=36,
        feed_forward_size=12288,
        rms_epsilon=1e-6,
        attention=attention,
        is_scanned=True,
    )


def reduced(config: DecoderConfig) -> DecoderConfig:
    """A decoder that a float32 reference can afford, with the same head dim and groups."""
    heads, shared = config.attention.num_query_heads, config.attention.num_key_value_heads
    attention = replace(
        config.attention,
        features=256,
        num_query_heads=2 * heads // shared,
        num_key_value_heads=2,
    )
    return replace(
        config, vocabulary_size=512, num_layers=2, feed_forward_size=512, attention=attention
    )


def parameters(config: DecoderConfig, seed: int) -> Leaves:
    """Random ones, as `ToDecoder` takes them."""

    def make(key: jax.Array) -> Leaves:
        return jax.tree.leaves(Decoder(config, rngs=nnx.Rngs(key)))

    return jax.jit(make)(jax.random.key(seed))


@dataclass(frozen=True)
class Stage:
    """One of the three, at some size.

    Attributes:
      batch: B.
      length: T of prompts and texts, or how much a cache holds.
      name: for the reader.
      is_scanned: whether a scan runs the layers.
    """

    batch: int
    length: int
    name: ClassVar[str]
    is_scanned: ClassVar[bool] = True

    @property
    def tokens(self) -> int:
        """How many a call runs."""
        return self.batch * self.length

    def inputs(self, config: DecoderConfig, leaves: Leaves, seed: int) -> tuple[Arrays, Arrays]:
        """What stays, and what each call replaces. The parameters given are used up."""
        raise NotImplementedError

    def step(self, decoder: ToDecoder, constants: Arrays, carried: Arrays) -> tuple[Arrays, Arrays]:
        """What is carried on, and a result."""
        raise NotImplementedError

    def answer(self, decoder: ToDecoder, constants: Arrays, carried: Arrays) -> Arrays:
        """What is judged."""
        raise NotImplementedError


@dataclass(frozen=True)
class Prefill(Stage):
    """Prompts into new caches."""

    batch: int = 1
    length: int = 8192
    name = "prefill"

    def inputs(self, config: DecoderConfig, leaves: Leaves, seed: int) -> tuple[Arrays, Arrays]:
        return (leaves, _tokens(config, seed, self.batch, self.length)), ()

    def step(self, decoder: ToDecoder, constants: Arrays, carried: Arrays) -> tuple[Arrays, Arrays]:
        logits, caches = self._run(decoder, *constants)
        return (), (jnp.argmax(logits, axis=-1), caches)

    def answer(self, decoder: ToDecoder, constants: Arrays, carried: Arrays) -> Arrays:
        return self._run(decoder, *constants)[0]

    def _run(self, decoder: ToDecoder, leaves: Leaves, tokens: jax.Array) -> tuple[Arrays, Arrays]:
        model = decoder(leaves)
        hidden, caches = model.prefill(tokens, capacity=self.length)
        return model.logits(hidden[:, -1]), caches


@dataclass(frozen=True)
class Train(Stage):
    """A step of AdamW on the next tokens of a text, each layer computed anew for its gradient."""

    batch: int = 1
    length: int = 4096
    name = "training step"

    def inputs(self, config: DecoderConfig, leaves: Leaves, seed: int) -> tuple[Arrays, Arrays]:
        return _tokens(config, seed, self.batch, self.length + 1), (leaves, _ADAM.init(leaves))

    def step(self, decoder: ToDecoder, constants: Arrays, carried: Arrays) -> tuple[Arrays, Arrays]:
        leaves, state = carried
        loss, gradients = self._gradients(decoder, leaves, constants)
        updates, state = _ADAM.update(gradients, state, leaves)
        return (optax.apply_updates(leaves, updates), state), loss

    def answer(self, decoder: ToDecoder, constants: Arrays, carried: Arrays) -> Arrays:
        return self._gradients(decoder, carried[0], constants)[1]

    def _gradients(
        self, decoder: ToDecoder, leaves: Leaves, texts: jax.Array
    ) -> tuple[jax.Array, Leaves]:
        def loss(leaves: Leaves) -> jax.Array:
            model = decoder(leaves)
            logits = model.logits(model(texts[:, :-1], remat=decoder.attention.remat))
            return optax.softmax_cross_entropy_with_integer_labels(
                logits.astype(jnp.float32), texts[:, 1:]
            ).mean()

        return jax.value_and_grad(loss)(leaves)


@dataclass(frozen=True)
class Decode(Stage):
    """One more token of each row, after which the cache holds `length` of them."""

    batch: int = 16
    length: int = 8192
    name = "decoding step"
    # A scan would copy every cache out of the stack and back.
    is_scanned = False

    @property
    def tokens(self) -> int:
        return self.batch

    def inputs(self, config: DecoderConfig, leaves: Leaves, seed: int) -> tuple[Arrays, Arrays]:
        attention = config.attention
        shape = (self.batch, self.length, attention.num_key_value_heads, attention.head_dim)

        @jax.jit
        def pair(key: jax.Array) -> Pair:
            first, second = jax.random.split(key)
            return (
                jax.random.normal(first, shape, attention.dtype),
                jax.random.normal(second, shape, attention.dtype),
            )

        keys = jax.random.split(jax.random.key(seed), config.num_layers)
        lengths = jnp.full(self.batch, self.length - 1, jnp.int32)
        tokens = _tokens(config, seed, self.batch, 1)
        return leaves, (Caches(tuple(pair(key) for key in keys), lengths), tokens)

    def step(self, decoder: ToDecoder, constants: Arrays, carried: Arrays) -> tuple[Arrays, Arrays]:
        caches, tokens = carried
        logits, extended = self._run(decoder, constants, caches, tokens)
        tokens = jnp.argmax(logits, axis=-1)[:, None].astype(jnp.int32)
        # Every step finds the cache as long as the first did.
        return (replace(extended, lengths=caches.lengths), tokens), ()

    def answer(self, decoder: ToDecoder, constants: Arrays, carried: Arrays) -> Arrays:
        return self._run(decoder, constants, *carried)[0]

    def _run(
        self, decoder: ToDecoder, leaves: Leaves, caches: Arrays, tokens: jax.Array
    ) -> tuple[jax.Array, Arrays]:
        model = decoder(leaves)
        hidden, caches = model.extend(tokens, caches)
        return model.logits(hidden[:, -1]), caches


STAGES: tuple[Stage, ...] = (Prefill(), Train(), Decode())

_ADAM = optax.adamw(1e-5, mu_dtype="bfloat16")


def _tokens(config: DecoderConfig, seed: int, batch: int, length: int) -> jax.Array:
    """Random ones, [batch, length]."""
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, config.vocabulary_size)
