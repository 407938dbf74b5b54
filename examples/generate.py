"""Generate text with a Llama or Qwen3 model, by default SmolLM2-135M-Instruct, its attention
computed by `pallas_flash`.

python examples/generate.py "Why is the sky blue?"
python examples/generate.py --prompt "Why is the sky blue?" --prompt "Name a river."  # one batch
python examples/generate.py --check
"""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import jax_attention
import numpy as np
from decoder import Decoder, DecoderConfig
from decoding import Generator, LengthError, Lengths
from loading import PACKAGE, WeightsError, find_weights, load
from text import render_chat, stream_text
from tokenizers import Tokenizer

import pallas_flash
from pallas_flash import backends
from pallas_flash.flax import AttentionConfig
from pallas_flash.spec import AttentionSpec, DecodeOperands, Operands
from pallas_flash.terminal import Parser, printing, refusal
from pallas_flash.validate import options

DEFAULT_PROMPT = "What is the capital of France?"
LOGIT_TOLERANCE = 1e-3
# How many characters of a prompt name it in a line of output.
TITLE_LENGTH = 72


def attention_calls(
    attention: AttentionConfig, lengths: Lengths, batch_size: int
) -> tuple[Operands, DecodeOperands]:
    """What a layer calls attention with: a prompt, or a chunk of it, and a step of decoding."""
    query_heads, key_value_heads = attention.num_query_heads, attention.num_key_value_heads

    def zeros(length: int, heads: int) -> jax.Array:
        dtype = attention.dtype or attention.param_dtype
        return jnp.zeros((batch_size, length, heads, attention.head_dim), dtype)

    row_lengths = jnp.zeros(batch_size, jnp.int32)
    sinks = jnp.zeros(query_heads) if attention.use_sinks else None
    cache = zeros(lengths.cache, key_value_heads)
    prompt = Operands(
        zeros(lengths.chunk if lengths.is_chunked else lengths.prefill, query_heads),
        *[cache if lengths.is_chunked else zeros(lengths.prefill, key_value_heads)] * 2,
        query_offset=row_lengths if lengths.is_chunked else None,
        query_seq_lengths=row_lengths,
        key_value_seq_lengths=row_lengths,
        sinks=sinks,
    )
    return prompt, DecodeOperands(zeros(1, query_heads), cache, cache, row_lengths, sinks=sinks)


def implementation_name(config: DecoderConfig, lengths: Lengths, batch_size: int) -> str:
    """What runs the attention of a decoder.

    Several names, if the prefill and the decoding, or layers, run on different implementations.
    """
    names = {}
    for layer in dict.fromkeys(config.layer(index) for index in range(config.num_layers)):
        scale, _ = options.scale(layer.scale, layer.head_dim)
        spec = AttentionSpec(
            scale=scale,
            is_causal=True,
            local_window_size=options.local_window_size(layer.local_window_size),
            logits_soft_cap=layer.logits_soft_cap,
            precision=options.precision(layer.precision),
        )
        for call in attention_calls(layer, lengths, batch_size):
            names[backends.select(layer.implementation, spec, call).name] = None
    return " and ".join(names)


def record(
    steps: Iterable[dict[int, int]], arrivals: list[tuple[dict[int, int], float]]
) -> Iterator[dict[int, int]]:
    """Pass `steps` on, adding each to `arrivals` with the time at which it came."""
    for tokens in steps:
        arrivals.append((tokens, time.perf_counter()))
        yield tokens


def rate(count: int, seconds: float) -> str:
    """Tokens per second in words."""
    return f"{count / seconds:.1f} tokens/s" if count else "no tokens"


def print_stream(tokenizer: Tokenizer, steps: Iterable[dict[int, int]]) -> None:
    """Print the one answer as it comes."""
    for text in stream_text(tokenizer, (tokens[0] for tokens in steps)):
        print(text, end="", flush=True)
    print()


def print_batch(
    tokenizer: Tokenizer, texts: Sequence[str], steps: Iterable[dict[int, int]]
) -> None:
    """Print the answer to each of `texts` once all are complete: as they come they would mix."""
    complete = list(steps)
    for row, text in enumerate(texts):
        title = " ".join(text.split())
        if len(title) > TITLE_LENGTH:
            title = f"{title[: TITLE_LENGTH - 3]}..."
        print(f"[prompt {row + 1}: {title}]")
        print(tokenizer.decode([tokens[row] for tokens in complete if row in tokens]))


def generate(
    generator: Generator,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    prompts: Sequence[Sequence[int]],
    implementation: str,
) -> list[list[int]]:
    """Print the answers to `texts`, whose tokens `prompts` holds, and then a line on their speed.

    Returns the tokens of each answer.
    """
    start = time.perf_counter()
    generator.warm_up(prompts)
    compiled = time.perf_counter()
    arrivals: list[tuple[dict[int, int], float]] = []
    steps = record(generator.generate(prompts), arrivals)
    if len(texts) == 1:
        print_stream(tokenizer, steps)
    else:
        print_batch(tokenizer, texts, steps)
    answers = [
        [tokens[row] for tokens, _ in arrivals if row in tokens] for row in range(len(prompts))
    ]
    # The prefill brings the first token of each answer, and the decoding steps those after it.
    times = [arrival for _, arrival in arrivals] or [time.perf_counter()]
    decoded = sum(len(answer[1:]) for answer in answers)
    print(
        f"[prefill {rate(sum(map(len, prompts)), times[0] - compiled)}, "
        f"decode {rate(decoded, times[-1] - times[0])}, "
        f"implementation {implementation}, compiled in {compiled - start:.1f} s]"
    )
    return answers


@jax.jit
def largest_difference(
    decoder: Decoder, hidden: jax.Array, other_hidden: jax.Array, counts: jax.Array
) -> jax.Array:
    """The largest difference between the logits of two runs' hidden states, each [B, T, D].

    Only the first `counts` [B] positions of each row count.
    """

    def at_position(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        logits, other_logits = decoder.logits(jnp.stack(pair)).astype(jnp.float32)
        difference = jnp.abs(logits - other_logits)
        # The maximum of a CPU may pass over NaN.
        return jnp.max(jnp.where(jnp.isnan(difference), jnp.inf, difference))

    flat = [x.reshape(-1, x.shape[-1]) for x in (hidden, other_hidden)]
    # In batches of positions, for the logits of a long prompt would fill gigabytes.
    differences = jax.lax.map(at_position, tuple(flat), batch_size=64).reshape(hidden.shape[:2])
    is_compared = jnp.arange(hidden.shape[1])[None, :] < counts[:, None]
    return jnp.max(differences, where=is_compared, initial=0.0)


def check(
    ours: Generator,
    other: Generator,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
) -> bool:
    """Compare two generators on the prompts and all of `answers`; print and return the verdict."""
    differences, agreements = [], []
    steps = zip(ours.replay(prompts, answers), other.replay(prompts, answers), strict=True)
    for index, (step, other_step) in enumerate(steps):
        # Positions beyond a prompt are its padding, and steps beyond an answer are not its own.
        if index == 0:
            counts = np.array([len(prompt) for prompt in prompts], np.int32)
        else:
            counts = np.array([index < len(answer) for answer in answers], np.int32)
        difference = largest_difference(ours.decoder, step.hidden, other_step.hidden, counts)
        differences.append(float(difference))
        agreements.extend((step.tokens == other_step.tokens)[counts > 0])
    passed = max(differences) < LOGIT_TOLERANCE and all(agreements)
    print(
        f"[check {'passed' if passed else 'FAILED'}: against jax.nn.dot_product_attention the "
        f"logits differ by at most {max(differences):.1e} (limit {LOGIT_TOLERANCE:.0e}) and "
        f"{sum(agreements)} of {len(agreements)} greedy tokens agree]"
    )
    return passed


def positive_int(text: str) -> int:
    """The value of an option that counts something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def make_parser() -> Parser:
    """The command line."""
    parser = Parser(prog="generate.py", description="Generate text with a Llama or Qwen3 model.")
    parser.add_argument("prompt", nargs="?", help=f"default: {DEFAULT_PROMPT}")
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        dest="more_prompts",
        metavar="TEXT",
        help="one more prompt; all of them run side by side, as one batch",
    )
    parser.add_argument(
        "--raw", action="store_true", help="continue the prompts themselves, without chat template"
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
        metavar="PATH",
        help="a GGUF file, or a folder in Hugging Face's layout (default: SmolLM2-135M-Instruct, "
        f"from the package {PACKAGE})",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare logits and tokens with jax.nn.dot_product_attention; exit with 1 on failure",
    )
    return parser


def prompt_texts(parser: Parser, arguments: argparse.Namespace) -> list[str]:
    """The prompts of the command line, none of them empty."""
    given = [] if arguments.prompt is None else [arguments.prompt]
    texts = [*given, *arguments.more_prompts] or [DEFAULT_PROMPT]
    for number, text in enumerate(texts, start=1):
        name = "the prompt" if len(texts) == 1 else f"prompt {number}"
        if not text.strip():
            parser.error(f"{name} is empty")
        try:
            # Bytes of the command line that are no text reach Python as lone surrogates.
            text.encode()
        except UnicodeEncodeError:
            parser.error(f"{name} is not valid text in the terminal's encoding")
    return texts


def run(arguments: argparse.Namespace, texts: Sequence[str]) -> bool:
    """Generate as the command line says; False if a check failed."""
    model = load(arguments.weights or find_weights())
    inputs = texts
    if not arguments.raw:
        if model.chat_template is None:
            raise WeightsError(
                "the model has no chat template; with --raw it continues the prompts themselves"
            )
        template, special_tokens = model.chat_template, model.special_tokens
        inputs = [render_chat(template, text, special_tokens) for text in texts]
    # A chat template writes the special tokens itself.
    prompts = [
        model.tokenizer.encode(text, add_special_tokens=arguments.raw).ids for text in inputs
    ]
    longest = max(len(prompt) for prompt in prompts)
    lengths = Lengths(longest, arguments.max_new_tokens, model.config.context_length)
    decoder = model.decoder.with_attention(implementation=arguments.implementation)
    implementation = implementation_name(decoder.config, lengths, len(prompts))
    ours = Generator(decoder, lengths, model.stop_tokens)
    answers = generate(ours, model.tokenizer, texts, prompts, implementation)
    if not arguments.check:
        return True
    reference = model.decoder.with_attention(jax_attention.attention, jax_attention.decode)
    return check(ours, Generator(reference, lengths), prompts, answers)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    texts = prompt_texts(parser, arguments)
    try:
        # Full float32 products, where a GPU would otherwise shorten them.
        with jax.default_matmul_precision("highest"), printing(parser.prog):
            passed = run(arguments, texts)
    except (WeightsError, LengthError) as error:
        parser.error(str(error))
    except NotImplementedError as error:
        parser.error(refusal(error))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
