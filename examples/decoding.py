"""Greedy decoding of a batch against preallocated caches, one compiled step at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
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
    """How many tokens go in and come out, and the array sizes which that takes.

    `prompt` is the length of the longest prompt, `max_new_tokens` how many may follow each.
    """

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
        """Length of the padded prompts."""
        return self._round_up(self.prompt)

    @property
    def cache(self) -> int:
        """Number of positions that each row of the cache has room for."""
        return self._round_up(self.prompt + self.max_new_tokens)

    def _round_up(self, length: int) -> int:
        return min(-(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, self.context)


class Step(NamedTuple):
    """What a run of the model gives: logits [B, V] of the next tokens, hidden [B, T, D], cache."""

    logits: jax.Array
    hidden: jax.Array
    cache: llama.Cache

    @property
    def tokens(self) -> np.ndarray:
        """The most likely next token of each row: [B]."""
        return np.asarray(jnp.argmax(self.logits, axis=-1))


@partial(jax.jit, static_argnames=("capacity", "config", "attention"))
def run_prefill(
    parameters: llama.Parameters,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    capacity: int,
    config: llama.LlamaConfig,
    attention: llama.Attention,
) -> Step:
    """Run prompts, `tokens` [B, T], of `lengths` [B] into a new cache."""
    hidden, cache = llama.prefill(
        parameters, tokens, lengths, capacity=capacity, config=config, attention=attention
    )
    last = jnp.take_along_axis(hidden, lengths[:, None, None] - 1, axis=1)
    return Step(llama.unembed(parameters, last)[:, 0], hidden, cache)


# The new cache takes over the buffers of the old one.
@partial(jax.jit, static_argnames=("config", "attention"), donate_argnames="cache")
def run_decode(
    parameters: llama.Parameters,
    tokens: jax.Array,
    cache: llama.Cache,
    *,
    config: llama.LlamaConfig,
    attention: llama.Attention,
) -> Step:
    """Run one more token of each row, `tokens` [B]."""
    hidden, cache = llama.decode(parameters, tokens, cache, config=config, attention=attention)
    return Step(llama.unembed(parameters, hidden)[:, 0], hidden, cache)


@dataclass(frozen=True)
class Decoder:
    """A model and its attention, set up for prompts and answers of certain lengths."""

    model: SmolLM2
    attention: llama.Attention
    lengths: Lengths

    def warm_up(self, prompts: Sequence[Sequence[int]]) -> None:
        """Compile the prefill and the decoding step for such a batch by running each once."""
        step = self.prefill(prompts)
        jax.block_until_ready(self.decode(step.tokens, step.cache))

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Step:
        """Run all of the prompts, of at least one token each, into a new cache."""
        padded = np.zeros((len(prompts), self.lengths.prefill), np.int32)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt)] = prompt
        return run_prefill(
            self.model.parameters,
            jnp.asarray(padded),
            jnp.asarray([len(prompt) for prompt in prompts], jnp.int32),
            capacity=self.lengths.cache,
            config=self.model.config,
            attention=self.attention,
        )

    def decode(self, tokens: Sequence[int] | np.ndarray, cache: llama.Cache) -> Step:
        """Run one more token of each row. The cache given is used up."""
        return run_decode(
            self.model.parameters,
            jnp.asarray(tokens, jnp.int32),
            cache,
            config=self.model.config,
            attention=self.attention,
        )

    def generate(self, prompts: Sequence[Sequence[int]]) -> Iterator[dict[int, int]]:
        """Each row's most likely next token, over and over, by the row's index.

        A row is left out from its stop token on. Ends when all rows are, or at the length limit.
        """
        running = set(range(len(prompts)))
        step = self.prefill(prompts)
        for count in range(1, self.lengths.max_new_tokens + 1):
            tokens = step.tokens
            running = {row for row in running if tokens[row] not in self.model.stop_tokens}
            if not running:
                return
            yield {row: int(tokens[row]) for row in sorted(running)}
            if count < self.lengths.max_new_tokens:
                # Rows that have ended run on with the others, and nobody reads what they give.
                step = self.decode(tokens, step.cache)

    def replay(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
    ) -> Iterator[Step]:
        """The steps that predict the tokens of `answers`, each fed with those before them.

        There are as many as the longest answer has tokens, and one at least; rows of shorter
        answers are fed with zeros.
        """
        step = self.prefill(prompts)
        yield step
        # The last tokens are predicted and not fed.
        for tokens in list(zip_longest(*answers, fillvalue=0))[:-1]:
            step = self.decode(tokens, step.cache)
            yield step
