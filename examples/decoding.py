"""Greedy decoding against a preallocated key/value cache, one compiled step at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import llama
import numpy as np
from smollm2 import SmolLM2

# Prompt and cache lengths are rounded up to a multiple of this, so that prompts of similar length
# share one compiled program.
LENGTH_MULTIPLE = 64


class LengthError(ValueError):
    """A prompt, or the text asked for, does not fit the model."""


@dataclass(frozen=True)
class Lengths:
    """How many tokens go in and come out, and the array sizes which that takes."""

    prompt: int
    max_new_tokens: int
    context: int

    def __post_init__(self) -> None:
        if self.prompt < 1:
            raise LengthError(f"the prompt needs at least 1 token, got {self.prompt}")
        if self.max_new_tokens < 1:
            raise LengthError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.prompt + self.max_new_tokens > self.context:
            raise LengthError(
                f"{self.prompt} prompt tokens plus {self.max_new_tokens} new tokens exceed the "
                f"model's context of {self.context} tokens"
            )

    @property
    def prefill(self) -> int:
        """Length of the padded prompt."""
        return self._round_up(self.prompt)

    @property
    def cache(self) -> int:
        """Number of positions that the cache holds."""
        return self._round_up(self.prompt + self.max_new_tokens)

    def _round_up(self, length: int) -> int:
        return min(-(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, self.context)


class Step(NamedTuple):
    """What one run of the model gives: logits [V] of the next token, hidden [1, T, D], cache."""

    logits: jax.Array
    hidden: jax.Array
    cache: llama.Cache

    @property
    def token(self) -> int:
        """The most likely next token."""
        return int(jnp.argmax(self.logits))


@partial(jax.jit, static_argnames=("config", "attention"), donate_argnames="cache")
def run_step(
    parameters: llama.Parameters,
    tokens: jax.Array,
    cache: llama.Cache,
    offset: jax.Array,
    length: jax.Array,
    *,
    config: llama.LlamaConfig,
    attention: llama.Attention,
) -> Step:
    """Run `tokens` [1, T] at positions from `offset` on, the last real one at `length` - 1."""
    hidden, cache = llama.forward(
        parameters, tokens, cache, offset, length[None], config=config, attention=attention
    )
    last = jax.lax.dynamic_slice_in_dim(hidden, length - 1 - offset, 1, axis=1)
    return Step(llama.unembed(parameters, last)[0, 0], hidden, cache)


@dataclass(frozen=True)
class Decoder:
    """A model and its attention function, set up for one sequence of certain lengths."""

    model: SmolLM2
    attention: llama.Attention
    lengths: Lengths

    def warm_up(self) -> None:
        """Compile the prefill and the decoding step by running each once."""
        step = self.prefill([0])
        jax.block_until_ready(self.decode(step.token, 1, step.cache))

    def prefill(self, prompt: Sequence[int]) -> Step:
        """Run the whole prompt into a new cache."""
        padded = np.zeros((1, self.lengths.prefill), np.int32)
        padded[0, : len(prompt)] = prompt
        cache = llama.empty_cache(self.model.config, 1, self.lengths.cache)
        return self._run(padded, cache, 0, len(prompt))

    def decode(self, token: int, position: int, cache: llama.Cache) -> Step:
        """Run the token at `position`. The new cache takes over the buffers of the old one."""
        return self._run(np.array([[token]], np.int32), cache, position, position + 1)

    def generate(self, prompt: Sequence[int]) -> Iterator[int]:
        """The most likely next token, over and over until a stop token or the length limit."""
        last = len(prompt) + self.lengths.max_new_tokens - 1
        step = self.prefill(prompt)
        for position in range(len(prompt), last + 1):
            token = step.token
            if token in self.model.stop_tokens:
                return
            yield token
            if position < last:
                step = self.decode(token, position, step.cache)

    def replay(self, prompt: Sequence[int], tokens: Sequence[int]) -> Iterator[Step]:
        """The steps that predict `tokens`, each fed with the given token before it."""
        step = self.prefill(prompt)
        yield step
        for position, token in enumerate(tokens[:-1], start=len(prompt)):
            step = self.decode(token, position, step.cache)
            yield step

    def _run(self, tokens: np.ndarray, cache: llama.Cache, offset: int, length: int) -> Step:
        return run_step(
            self.model.parameters,
            jnp.asarray(tokens),
            cache,
            jnp.int32(offset),
            jnp.int32(length),
            config=self.model.config,
            attention=self.attention,
        )
