"""Generate text with SmolLM2-135M-Instruct, its attention computed by `pallas_flash`.

python examples/generate.py "Why is the sky blue?"
python examples/generate.py --check
"""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import jax
import jax.numpy as jnp
import llama
import smollm2
from decoding import Decoder, LengthError, Lengths

import pallas_flash
from pallas_flash import backends
from pallas_flash.spec import AttentionSpec, Operands

DEFAULT_PROMPT = "What is the capital of France?"
LOGIT_TOLERANCE = 1e-3


@dataclass(frozen=True)
class FlashAttention:
    """The library's attention as the model calls it; equal ones share what they compiled."""

    implementation: str | None = None

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        offset: jax.Array,
        length: jax.Array,
    ) -> jax.Array:
        """As `llama.Attention` says."""
        return pallas_flash.flash_attention(
            query,
            key,
            value,
            is_causal=True,
            query_offset=offset,
            key_value_seq_lengths=length,
            implementation=self.implementation,
        )


def reference_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, offset: jax.Array, length: jax.Array
) -> jax.Array:
    """JAX's own attention, which needs the positions spelled out as a mask."""
    query_positions = offset + jnp.arange(query.shape[1], dtype=jnp.int32)[None, None, :, None]
    key_positions = jnp.arange(key.shape[1], dtype=jnp.int32)[None, None, None, :]
    mask = (key_positions <= query_positions) & (key_positions < length[:, None, None, None])
    return jax.nn.dot_product_attention(query, key, value, mask=mask)


def implementation_name(decoder: Decoder, requested: str | None) -> str:
    """The implementation that runs the decoder's prefill when the user asks for `requested`."""
    config, lengths = decoder.model.config, decoder.lengths
    query = jnp.zeros((1, lengths.prefill, config.num_query_heads, config.head_dim), jnp.float32)
    key, value = llama.empty_cache(config, 1, lengths.cache)[0]
    spec = AttentionSpec(
        scale=config.head_dim**-0.5, is_causal=True, precision=jax.lax.Precision.HIGHEST
    )
    return backends.select(requested, spec, Operands(query, key, value)).name


def record(tokens: Iterable[int], arrivals: list[tuple[int, float]]) -> Iterator[int]:
    """Pass `tokens` on, adding each to `arrivals` with the time at which it came."""
    for token in tokens:
        arrivals.append((token, time.perf_counter()))
        yield token


def rate(count: int, seconds: float) -> str:
    """Tokens per second in words."""
    return f"{count / seconds:.1f} tokens/s" if count else "no tokens"


def generate(decoder: Decoder, prompt: Sequence[int], implementation: str) -> list[int]:
    """Print the text as it comes and then a line on its speed. Returns the tokens."""
    start = time.perf_counter()
    decoder.warm_up()
    compiled = time.perf_counter()
    arrivals: list[tuple[int, float]] = []
    tokens = record(decoder.generate(prompt), arrivals)
    for text in smollm2.stream_text(decoder.model.tokenizer, tokens):
        print(text, end="", flush=True)
    # The prefill brings the first token, and a decoding step each one after it.
    times = [arrival for _, arrival in arrivals] or [time.perf_counter()]
    print(
        f"\n[prefill {rate(len(prompt), times[0] - compiled)}, "
        f"decode {rate(len(times) - 1, times[-1] - times[0])}, "
        f"implementation {implementation}, compiled in {compiled - start:.1f} s]"
    )
    return [token for token, _ in arrivals]


@jax.jit
def largest_difference(
    parameters: llama.Parameters, hidden: jax.Array, other_hidden: jax.Array
) -> jax.Array:
    """The largest difference between the logits of two runs' hidden states, each [T, D]."""

    def at_position(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        logits, other_logits = llama.unembed(parameters, jnp.stack(pair)[:, None, :])
        return jnp.max(jnp.abs(logits - other_logits))

    # In batches of positions, for the logits of a long prompt would fill gigabytes.
    return jnp.max(jax.lax.map(at_position, (hidden, other_hidden), batch_size=64))


def check(ours: Decoder, other: Decoder, prompt: Sequence[int], tokens: Sequence[int]) -> bool:
    """Compare two decoders on the prompt and each of `tokens`; print and return the verdict."""
    differences, agreements = [], []
    steps = zip(ours.replay(prompt, tokens), other.replay(prompt, tokens), strict=True)
    for index, (step, other_step) in enumerate(steps):
        # Hidden states beyond the prompt belong to its padding.
        count = len(prompt) if index == 0 else 1
        difference = largest_difference(
            ours.model.parameters, step.hidden[0, :count], other_step.hidden[0, :count]
        )
        differences.append(float(difference))
        agreements.append(step.token == other_step.token)
    passed = max(differences) < LOGIT_TOLERANCE and all(agreements)
    print(
        f"[check {'passed' if passed else 'FAILED'}: against jax.nn.dot_product_attention the "
        f"logits differ by at most {max(differences):.1e} (limit {LOGIT_TOLERANCE:.0e}) and "
        f"{sum(agreements)} of {len(agreements)} greedy tokens agree]"
    )
    return passed


class Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line, without the usage text before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def positive_int(text: str) -> int:
    """The value of an option that counts something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def make_parser() -> Parser:
    """The command line."""
    parser = Parser(prog="generate.py", description="Generate text with SmolLM2-135M-Instruct.")
    parser.add_argument("prompt", nargs="?", default=DEFAULT_PROMPT, help="default: %(default)s")
    parser.add_argument(
        "--raw", action="store_true", help="continue the prompt itself, without the chat template"
    )
    parser.add_argument("--max-new-tokens", type=positive_int, default=64, metavar="COUNT")
    parser.add_argument(
        "--implementation",
        choices=pallas_flash.IMPLEMENTATIONS,
        help="what computes the attention (default: the library chooses)",
    )
    parser.add_argument(
        "--weights",
        type=Path,
        metavar="FILE",
        help=f"a GGUF file (default: the one in the package {smollm2.PACKAGE})",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare logits and tokens with jax.nn.dot_product_attention; exit with 1 on failure",
    )
    return parser


def run(arguments: argparse.Namespace) -> bool:
    """Generate as the command line says; False if a check failed."""
    model = smollm2.load(arguments.weights or smollm2.find_weights())
    text = arguments.prompt
    if not arguments.raw:
        text = smollm2.render_chat(model.chat_template, text)
    prompt = model.tokenizer.encode(text).ids
    lengths = Lengths(len(prompt), arguments.max_new_tokens, model.config.context_length)
    decoder = Decoder(model, FlashAttention(arguments.implementation), lengths)
    tokens = generate(decoder, prompt, implementation_name(decoder, arguments.implementation))
    if not arguments.check:
        return True
    return check(decoder, Decoder(model, reference_attention, lengths), prompt, tokens)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if not arguments.prompt.strip():
        parser.error("the prompt is empty")
    try:
        # Bytes of the command line that are no text reach Python as lone surrogates.
        arguments.prompt.encode()
    except UnicodeEncodeError:
        parser.error("the prompt is not valid text in the terminal's encoding")
    try:
        # Full float32 products, where a GPU would otherwise shorten them.
        with jax.default_matmul_precision("highest"):
            passed = run(arguments)
    except (smollm2.WeightsError, LengthError) as error:
        parser.error(str(error))
    except NotImplementedError as error:
        # The call in the first line, and a reason in each one after it.
        call, *reasons = str(error).splitlines()
        parser.error(f"{'; '.join(reason.strip() for reason in reasons)} ({call.rstrip(':')})")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
