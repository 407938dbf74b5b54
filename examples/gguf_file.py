"""Llama and Qwen3 models in GGUF files: configuration, weights, tokenizer and chat template."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from decoder import Decoder, DecoderConfig
from gguf import GGUFReader, ReaderTensor, TokenType
from gguf.quants import dequantize
from jax.typing import DTypeLike
from metadata import Metadata
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from weights import Tensor, WeightsError, fill

from pallas_flash.flax import AttentionConfig, LinearScaling, RotaryEmbedding, YarnScaling

# The file's name of each parameter.
NAMES = {
    "embedding.embedding": "token_embd.weight",
    "layers.{}.attention_norm.scale": "blk.{}.attn_norm.weight",
    "layers.{}.attention.query.kernel": "blk.{}.attn_q.weight",
    "layers.{}.attention.query.bias": "blk.{}.attn_q.bias",
    "layers.{}.attention.query_norm.scale": "blk.{}.attn_q_norm.weight",
    "layers.{}.attention.key.kernel": "blk.{}.attn_k.weight",
    "layers.{}.attention.key.bias": "blk.{}.attn_k.bias",
    "layers.{}.attention.key_norm.scale": "blk.{}.attn_k_norm.weight",
    "layers.{}.attention.value.kernel": "blk.{}.attn_v.weight",
    "layers.{}.attention.value.bias": "blk.{}.attn_v.bias",
    "layers.{}.attention.out.kernel": "blk.{}.attn_output.weight",
    "layers.{}.attention.out.bias": "blk.{}.attn_output.bias",
    "layers.{}.feed_forward_norm.scale": "blk.{}.ffn_norm.weight",
    "layers.{}.gate.kernel": "blk.{}.ffn_gate.weight",
    "layers.{}.up.kernel": "blk.{}.ffn_up.weight",
    "layers.{}.down.kernel": "blk.{}.ffn_down.weight",
    "output_norm.scale": "output_norm.weight",
    "unembedding.kernel": "output.weight",
}

# Divides the frequencies of rotary embedding, one number for each.
FREQUENCY_FACTORS = "rope_freqs.weight"

# What the metadata may say of an architecture, after its name and a dot.
KNOWN_METADATA = (
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "vocab_size",
)

# How text is split before the merges, by the name that files give it.
PRE_TOKENIZERS = {
    "smollm": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    ),
    "qwen2": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(
                    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
                    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
                ),
                behavior="isolated",
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}


@dataclass(frozen=True)
class FrequencyFactors:
    """A `RotaryScaling` that a file spells out: each frequency is divided by its factor."""

    factors: tuple[float, ...]

    def scaled(self, frequencies: np.ndarray, base: float) -> tuple[np.ndarray, float]:
        factors = np.array(self.factors)
        is_positive = np.isfinite(factors) & (factors > 0)
        if factors.shape != frequencies.shape or not is_positive.all():
            expected = f"{len(frequencies)} finite numbers above 0"
            raise ValueError(f"{FREQUENCY_FACTORS}: expected {expected}, got {self.factors!r:.80}")
        return frequencies / factors, 1.0


class GGUFFile:
    """One file, mapped into memory; its parts are read when they are asked for."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
          WeightsError: the file is not there, or ends before its last tensor does.
        """
        try:
            reader = GGUFReader(path)
            values = {name: field.contents() for name, field in reader.fields.items()}
        except OSError as error:
            raise WeightsError(f"cannot read weights file {path}: {error.strerror}") from error
        # What the reader raises depends on where in the file it stumbles.
        except (ValueError, IndexError, KeyError, OverflowError) as error:
            raise WeightsError(f"weights file {path} is truncated or not a GGUF file") from error
        self._metadata = Metadata(f"weights file {path}", values)
        # GGUF has the innermost dimension first.
        self.tensors = {
            x.name: Tensor(tuple(int(size) for size in reversed(x.shape)), partial(_dequantised, x))
            for x in reader.tensors
        }

    def config(self) -> DecoderConfig:
        """What the metadata says of the decoder, and which tensors there are."""
        metadata = self._architecture
        features = metadata.get("embedding_length", int)
        query_heads = metadata.get("attention.head_count", int)
        head_dim = metadata.get("attention.key_length", int, features // max(query_heads, 1))
        for name in ("attention.value_length", "rope.dimension_count"):
            metadata.one_of(name, (head_dim,), head_dim)
        metadata.refuse_others(KNOWN_METADATA)
        epsilon = metadata.get("attention.layer_norm_rms_epsilon", float)
        tokens = self._metadata.get("tokenizer.ggml.tokens", list, [])
        try:
            return DecoderConfig(
                vocabulary_size=metadata.get("vocab_size", int, len(tokens)),
                context_length=metadata.get("context_length", int),
                num_layers=metadata.get("block_count", int),
                feed_forward_size=metadata.get("feed_forward_length", int),
                rms_epsilon=epsilon,
                attention=AttentionConfig(
                    features=features,
                    num_query_heads=query_heads,
                    num_key_value_heads=metadata.get("attention.head_count_kv", int, query_heads),
                    head_dim=head_dim,
                    use_bias="blk.0.attn_q.bias" in self.tensors,
                    norm_epsilon=epsilon if self._name == "qwen3" else None,
                    rotary=self._rotary(),
                ),
                # A file without an output matrix ties it to the embedding.
                has_tied_embeddings=NAMES["unembedding.kernel"] not in self.tensors,
            )
        except ValueError as error:
            source = self._metadata.source
            raise WeightsError(f"{source} describes no {self._name} model: {error}") from error

    def decoder(self, dtype: DTypeLike) -> Decoder:
        """The weights, dequantised to float32 and then cast to `dtype`."""
        config = self.config()
        tensors = {name: x for name, x in self.tensors.items() if name != FREQUENCY_FACTORS}
        if self._name == "llama":
            for name, tensor in tensors.items():
                if re.fullmatch(r"blk\.\d+\.attn_[qk]\.(weight|bias)", name):
                    read = partial(_half_split, tensor.read, config.attention.head_dim)
                    tensors[name] = Tensor(tensor.shape, read)
        return fill(config, NAMES, tensors, dtype)

    def tokenizer(self) -> Tokenizer:
        """Of byte-level pairs, from the file's vocabulary, merges and types of tokens."""
        metadata = self._metadata
        metadata.one_of("tokenizer.ggml.model", ("gpt2",))
        split = metadata.one_of("tokenizer.ggml.pre", tuple(PRE_TOKENIZERS))
        for name in ("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token"):
            metadata.one_of(name, (False,), False)
        tokens = metadata.get("tokenizer.ggml.tokens", list)
        types = metadata.get("tokenizer.ggml.token_type", list)
        merges = metadata.get("tokenizer.ggml.merges", list)
        # Those that text may spell and merges do not make.
        whole = {TokenType.CONTROL: True, TokenType.USER_DEFINED: False}
        try:
            model = models.BPE(
                vocab={token: index for index, token in enumerate(tokens)},
                merges=[tuple(merge.split(" ")) for merge in merges],
            )
            added = [
                AddedToken(token, special=whole[kind], normalized=False)
                for token, kind in zip(tokens, types, strict=True)
                if kind in whole
            ]
        # The library of tokenizers has no errors of its own.
        except Exception as error:
            raise WeightsError(f"{metadata.source} describes no tokenizer: {error}") from error
        tokenizer = Tokenizer(model)
        tokenizer.add_tokens(added)
        if split == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = PRE_TOKENIZERS[split]
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def chat_template(self) -> str | None:
        """Of Jinja."""
        return self._metadata.optional("tokenizer.chat_template", str)

    def special_tokens(self) -> dict[str, str]:
        """By the names that chat templates have for them."""
        tokens = self._metadata.get("tokenizer.ggml.tokens", list)
        found = {}
        for name in ("bos_token", "eos_token"):
            field = f"tokenizer.ggml.{name}_id"
            index = self._metadata.optional(field, int)
            if index is not None:
                if not 0 <= index < len(tokens):
                    raise self._metadata.unexpected(field, f"one of {len(tokens)} tokens")
                found[name] = tokens[index]
        return found

    def stop_tokens(self) -> frozenset[int]:
        """Ends of a text and of a turn."""
        ids = {self._metadata.get("tokenizer.ggml.eos_token_id", int)}
        ids.add(self._metadata.get("tokenizer.ggml.eot_token_id", int, min(ids)))
        tokens = self._metadata.get("tokenizer.ggml.tokens", list)
        return frozenset(ids | {i for i, token in enumerate(tokens) if token == "<|endoftext|>"})

    @property
    def _name(self) -> str:
        """Of the architecture."""
        return self._metadata.one_of("general.architecture", ("llama", "qwen3"))

    @property
    def _architecture(self) -> Metadata:
        """What the metadata says of it, under names without its own."""
        prefix = f"{self._name}."
        values = {
            name.removeprefix(prefix): x
            for name, x in self._metadata.values.items()
            if name.startswith(prefix)
        }
        return Metadata(self._metadata.source, values)

    def _rotary(self) -> RotaryEmbedding:
        metadata = self._architecture
        base = metadata.get("rope.freq_base", float, 10000.0)
        # The format's own default is the linear one.
        default = "none" if metadata.values.get("rope.scaling.factor") is None else "linear"
        kind = metadata.one_of("rope.scaling.type", ("none", "linear", "yarn"), default)
        factors = self.tensors.get(FREQUENCY_FACTORS)
        if factors is not None and kind != "none":
            raise metadata.unexpected("rope.scaling.factor", f"none beside {FREQUENCY_FACTORS}")
        if kind == "none":
            metadata.refuse("rope.scaling.factor")
            if factors is None:
                return RotaryEmbedding(base)
            numbers = factors.read().ravel().tolist()
            return RotaryEmbedding(base, FrequencyFactors(tuple(numbers)))
        factor = metadata.get("rope.scaling.factor", float)
        if kind == "linear":
            return RotaryEmbedding(base, LinearScaling(factor))
        length = metadata.get("rope.scaling.original_context_length", int)
        return RotaryEmbedding(base, YarnScaling(factor, length))


def _dequantised(tensor: ReaderTensor) -> np.ndarray:
    try:
        return dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise WeightsError(
            f"tensor {tensor.name!r} of the weights is {kind}, which is not supported"
        ) from error


def _half_split(read: Callable[[], np.ndarray], head_dim: int) -> np.ndarray:
    """Rows of heads that rotary embedding turns in pairs (i, i + H/2).

    In a Llama's file the pairs are (2i, 2i + 1).
    """
    rows = read()
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
