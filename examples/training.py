"""The training of a small decoder on the bytes of a text, and what it then writes.

Letters: B stretches of text in a batch, T bytes in each, V values of a byte.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from corpus import VOCABULARY_SIZE, Corpus
from decoder import Decoder, DecoderConfig
from flax import nnx

import pallas_flash
from pallas_flash import backends, flash_attention, flash_decode
from pallas_flash.flax import AttentionConfig, RotaryEmbedding
from pallas_flash.spec import AttentionSpec, Operands

DTYPES = ("float32", "bfloat16")

# A layer's gradient computes the layer anew, all but its attention, whose results are kept.
remat = partial(
    jax.checkpoint,
    policy=jax.checkpoint_policies.save_only_these_names(
        pallas_flash.OUT_NAME, pallas_flash.LSE_NAME
    ),
)


@dataclass(frozen=True)
class TrainConfig:
    """What is trained, and how.

    Attributes:
      steps: of the optimizer, up to 2^31 - 1, as are the two that follow.
      batch: B.
      length: T.
      seed: of the parameters and of the order of the text, from 0 to 2^32 - 1.
      learning_rate: the highest, after a tenth of the steps; from there it falls by half a cosine.
      num_layers: of the decoder, as are those that follow.
      features: D.
      num_query_heads: N.
      num_key_value_heads: K, which divides N.
      head_dim: H, even.
      feed_forward_size: of the gated network in each layer.
      dtype: of the computation, one of `DTYPES`; parameters are float32.
      implementation: as in `flash_attention`.
    """

    steps: int = 300
    batch: int = 4
    # Two blocks of the "xla" implementation, so that attention is merged of parts.
    length: int = 512
    seed: int = 0
    # At 1e-2 what float32 rounds grows until two curves part: with stretches of 64, within 1000
    # steps, by 0.1. At this rate it is 1e-5.
    learning_rate: float = 3e-3
    num_layers: int = 2
    features: int = 128
    num_query_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    feed_forward_size: int = 384
    dtype: str = "float32"
    implementation: str | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "length"):
            x = getattr(self, name)
            if not 1 <= x < 2**31:
                raise ValueError(f"{name} must be from 1 to 2^31 - 1, got {x}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be from 0 to 2^32 - 1, got {self.seed}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        # The sizes have their own checks there.
        _ = self.decoder

    @property
    def decoder(self) -> DecoderConfig:
        """Of Qwen3's kind, with layers that a scan runs."""
        attention = AttentionConfig(
            features=self.features,
            num_query_heads=self.num_query_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            rotary=RotaryEmbedding(),
            norm_epsilon=1e-6,
            dtype=self.dtype,
            implementation=self.implementation,
        )
        return DecoderConfig(
            vocabulary_size=VOCABULARY_SIZE,
            context_length=self.length,
            num_layers=self.num_layers,
            feed_forward_size=self.feed_forward_size,
            rms_epsilon=1e-6,
            attention=attention,
            is_scanned=True,
        )

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """AdamW on gradients of norm 1 at most."""
        learning_rate = optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=self.learning_rate,
            warmup_steps=self.steps // 10,
            decay_steps=self.steps,
        )
        return optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(learning_rate, weight_decay=0.01)
        )

    def resolved(self) -> Self:
        """The same, with the implementation by its name that flash attention takes here.

        Raises:
          NotImplementedError: the one that is asked for cannot run this.
        """
        query, key = (
            jnp.zeros((self.batch, self.length, heads, self.head_dim), self.dtype)
            for heads in (self.num_query_heads, self.num_key_value_heads)
        )
        spec = AttentionSpec(scale=self.head_dim**-0.5, is_causal=True)
        chosen = backends.select(self.implementation, spec, Operands(query, key, key))
        return replace(self, implementation=chosen.name)


class State(NamedTuple):
    """What each step replaces."""

    # A `Decoder`, which optax takes as any pytree, but not by its types.
    model: Any
    optimizer: optax.OptState


def loss_of(model: Decoder, texts: jax.Array) -> jax.Array:
    """Mean cross-entropy of each byte given those before it, in nats, of `texts` [B, T + 1]."""
    logits = model.logits(model(texts[:, :-1], remat=remat))
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), texts[:, 1:]
    ).mean()


class Training:
    """A decoder in training, from random parameters on.

    Attributes:
      config: what is trained, and how.
      model: the decoder after the steps that have run; the next one uses up its arrays.
    """

    def __init__(
        self,
        config: TrainConfig,
        corpus: Corpus,
        *,
        attention_fn: Callable[..., jax.Array] = flash_attention,
        decode_fn: Callable[..., jax.Array] = flash_decode,
    ) -> None:
        """Make the parameters, the same for any attention, and compile the step.

        Raises:
          CorpusError: the text is too short.
          NotImplementedError: the implementation cannot run this.
        """
        self.config = config
        self._corpus = corpus
        optimizer = config.optimizer

        def start(key: jax.Array) -> State:
            model: Any = Decoder(
                config.decoder,
                attention_fn=attention_fn,
                decode_fn=decode_fn,
                rngs=nnx.Rngs(key),
            )
            return State(model, optimizer.init(model))

        def step(state: State, texts: jax.Array) -> tuple[State, jax.Array]:
            loss, gradients = jax.value_and_grad(loss_of)(state.model, texts)
            updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.model)
            return State(optax.apply_updates(state.model, updates), optimizer_state), loss

        self._state = jax.jit(start)(jax.random.key(config.seed))
        # Ahead of the first step, whose time is then like that of any other.
        self._step = jax.jit(step, donate_argnums=0).lower(self._state, self._texts(0)).compile()

    @property
    def model(self) -> Decoder:
        return self._state.model

    def run(self) -> Iterator[jax.Array]:
        """Train; the loss of each step, float32 [], on a batch that it has not yet learned from."""
        for index in range(self.config.steps):
            self._state, loss = self._step(self._state, self._texts(index))
            yield loss

    def _texts(self, index: int) -> np.ndarray:
        config = self.config
        return self._corpus.batch(config.batch, config.length, config.seed, index)


@partial(jax.jit, static_argnames="count")
def write(
    model: Decoder, prompt: jax.Array, key: jax.Array, *, count: int, temperature: float = 0.7
) -> jax.Array:
    """Draw the `count` bytes after `prompt`, int32 [P], one by one; int32 [count].

    At a temperature below 1 likely bytes are drawn still more often.
    """
    hidden, caches = model.prefill(prompt[None], capacity=prompt.size + count)

    def step(carry: tuple, key: jax.Array) -> tuple[tuple, jax.Array]:
        hidden, caches = carry
        logits = model.logits(hidden[:, -1:]).astype(jnp.float32)
        token = jax.random.categorical(key, logits / temperature)
        return model.extend(token, caches), token[0, 0]

    # Each step's hidden states are of one token, as are those that the first one gets.
    _, tokens = jax.lax.scan(step, (hidden[:, -1:], caches), jax.random.split(key, count))
    return tokens
