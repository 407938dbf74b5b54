"""Greedy decoding of a batch against preallocated caches, one compiled step at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import zip_longest
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from decoder import Caches, Decoder
from jax.tree_util import PyTreeDef

# Prompt and cache lengths are rounded up to a multiple of this, so that prompts of similar length
# share one compiled program.
LENGTH_MULTIPLE = 64


class LengthError(ValueError):
    """A prompt, or the text asked for, does not fit the model."""


@dataclass(frozen=True)
class Lengths:
    """How many tokens go in and come out, and the array sizes which that takes.

    Attributes:
      prompt: tokens of the longest prompt.
      max_new_tokens: how many may follow each.
      context: how many the model was made for.
      chunk: longer prompts are run in chunks of so many tokens, so that activations take no more
        memory than those of one chunk.
    """

    prompt: int
    max_new_tokens: int
    context: int
    chunk: int = 2048

    def __post_init__(self) -> None:
        if self.prompt < 1:
            raise LengthError(f"the prompt needs at least 1 token, got {self.prompt}")
        for name in ("max_new_tokens", "chunk"):
            if getattr(self, name) < 1:
                raise LengthError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.prompt + self.max_new_tokens > self.context:
            raise LengthError(
                f"{self.prompt} prompt tokens plus {self.max_new_tokens} new tokens exceed the "
                f"model's context of {self.context} tokens"
            )

    @property
    def is_chunked(self) -> bool:
        """Whether prompts are run in chunks."""
        return self.prompt > self.chunk

    @property
    def prefill(self) -> int:
        """Length of the padded prompts."""
        if self.is_chunked:
            return _rounded_up(self.prompt, self.chunk)
        return min(_rounded_up(self.prompt, LENGTH_MULTIPLE), self.context)

    @property
    def cache(self) -> int:
        """Number of positions that each row of the caches has room for."""
        return min(_rounded_up(self.prompt + self.max_new_tokens, LENGTH_MULTIPLE), self.context)


def _rounded_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


class Step(NamedTuple):
    """What a run of the decoder gives.

    Attributes:
      logits: [B, V], of the next token of each row.
      hidden: [B, T, D], of all tokens that ran; means nothing where they are padding.
      caches: with these tokens.
    """

    logits: jax.Array
    hidden: jax.Array
    caches: Caches

    @property
    def tokens(self) -> np.ndarray:
        """The most likely next token of each row: [B]."""
        return np.asarray(jnp.argmax(self.logits, axis=-1))


# A decoder reaches both programs in two parts, as `jax.tree.flatten` gives them: taking it apart
# anew for each token would cost a tenth of the time.


@partial(jax.jit, static_argnames=("structure", "capacity"))
def run_prefill(
    structure: PyTreeDef,
    leaves: list[jax.Array],
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    capacity: int,
) -> Step:
    """Run prompts, `tokens` [B, T], of `lengths` [B] into new caches."""
    decoder: Decoder = jax.tree.unflatten(structure, leaves)
    hidden, caches = decoder.prefill(tokens, lengths, capacity=capacity)
    return Step(_next_logits(decoder, hidden, lengths), hidden, caches)


# The new caches take over the buffers of the old ones.
@partial(jax.jit, static_argnames="structure", donate_argnames="caches")
def run_extend(
    structure: PyTreeDef,
    leaves: list[jax.Array],
    tokens: jax.Array,
    caches: Caches,
    counts: jax.Array | None = None,
) -> Step:
    """Run the next tokens of each row, [B, T], of which `counts` [B] are no padding."""
    decoder: Decoder = jax.tree.unflatten(structure, leaves)
    hidden, caches = decoder.extend(tokens, caches, counts)
    if counts is None:
        counts = jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32)
    return Step(_next_logits(decoder, hidden, counts), hidden, caches)


def _next_logits(decoder: Decoder, hidden: jax.Array, counts: jax.Array) -> jax.Array:
    """Logits [B, V] at the last token of each row that is no padding; of any, if all of it is."""
    last = jnp.maximum(counts - 1, 0)
    return decoder.logits(jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0])


@dataclass(frozen=True, eq=False)
class Generator:
    """A decoder, set up for prompts and answers of certain lengths.

    Attributes:
      decoder: what runs.
      lengths: of the longest prompt and of the answers.
      stop_tokens: any of them ends an answer.
    """

    decoder: Decoder
    lengths: Lengths
    stop_tokens: frozenset[int] = frozenset()

    def warm_up(self, prompts: Sequence[Sequence[int]]) -> None:
        """Compile what runs for such a batch, by a run of its first chunk and one of a token."""
        step = self.prefill([prompt[: self.lengths.chunk] for prompt in prompts])
        jax.block_until_ready(self.decode(step.tokens, step.caches))

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Step:
        """Run all of the prompts, of at least one token each, into new caches."""
        counts = np.array([len(prompt) for prompt in prompts], np.int32)
        if not counts.all():
            row = int(np.argmin(counts))
            raise LengthError(f"prompt {row + 1} of {len(prompts)} needs at least 1 token, got 0")
        padded = np.zeros((len(prompts), self.lengths.prefill), np.int32)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt)] = prompt
        if self.lengths.is_chunked:
            return self._prefill_in_chunks(padded, counts)
        return run_prefill(
            *self._parts, jnp.asarray(padded), jnp.asarray(counts), capacity=self.lengths.cache
        )

    def decode(self, tokens: Sequence[int] | np.ndarray, caches: Caches) -> Step:
        """Run one more token of each row. The caches given are used up."""
        return run_extend(*self._parts, jnp.asarray(tokens, jnp.int32)[:, None], caches)

    def generate(self, prompts: Sequence[Sequence[int]]) -> Iterator[dict[int, int]]:
        """Each row's most likely next token, over and over, by the row's index.

        A row is left out from its stop token on. Ends when all rows are, or at the length limit.
        """
        running = set(range(len(prompts)))
        step = self.prefill(prompts)
        for count in range(1, self.lengths.max_new_tokens + 1):
            tokens = step.tokens
            running = {row for row in running if tokens[row] not in self.stop_tokens}
            if not running:
                return
            yield {row: int(tokens[row]) for row in sorted(running)}
            if count < self.lengths.max_new_tokens:
                # Rows that have ended run on with the others, and nobody reads what they give.
                step = self.decode(tokens, step.caches)

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
            step = self.decode(tokens, step.caches)
            yield step

    @cached_property
    def _parts(self) -> tuple[PyTreeDef, list[jax.Array]]:
        """The decoder as programs take it."""
        leaves, structure = jax.tree.flatten(self.decoder)
        return structure, leaves

    def _prefill_in_chunks(self, padded: np.ndarray, counts: np.ndarray) -> Step:
        """Prompts [B, T] of lengths `counts` [B], with the activations of one chunk at a time."""
        chunk = self.lengths.chunk

        def run(start: int, caches: Caches) -> Step:
            tokens = jnp.asarray(padded[:, start : start + chunk])
            here = jnp.asarray(np.clip(counts - start, 0, chunk))
            return run_extend(*self._parts, tokens, caches, here)

        step = run(0, self.decoder.empty_caches(len(padded), self.lengths.cache))
        hidden = [step.hidden]
        for start in range(chunk, int(counts.max()), chunk):
            after = run(start, step.caches)
            hidden.append(after.hidden)
            # A prompt that has ended keeps what its last token gave.
            is_running = jnp.asarray(counts > start)[:, None]
            step = after._replace(logits=jnp.where(is_running, after.logits, step.logits))
        return step._replace(hidden=jnp.concatenate(hidden, axis=1))
