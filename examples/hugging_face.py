"""Llama and Qwen3 models in folders as Hugging Face's transformers lays them out."""

import json
from functools import partial
from pathlib import Path

import numpy as np
from decoder import Decoder, DecoderConfig
from jax.typing import DTypeLike
from metadata import Metadata
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from weights import Tensor, WeightsError, fill

from pallas_flash.flax import (
    AttentionConfig,
    LinearScaling,
    Llama3Scaling,
    RotaryEmbedding,
    RotaryScaling,
    YarnScaling,
)

# The tensor of each parameter.
NAMES = {
    "embedding.embedding": "model.embed_tokens.weight",
    "layers.{}.attention_norm.scale": "model.layers.{}.input_layernorm.weight",
    "layers.{}.attention.query.kernel": "model.layers.{}.self_attn.q_proj.weight",
    "layers.{}.attention.query.bias": "model.layers.{}.self_attn.q_proj.bias",
    "layers.{}.attention.query_norm.scale": "model.layers.{}.self_attn.q_norm.weight",
    "layers.{}.attention.key.kernel": "model.layers.{}.self_attn.k_proj.weight",
    "layers.{}.attention.key.bias": "model.layers.{}.self_attn.k_proj.bias",
    "layers.{}.attention.key_norm.scale": "model.layers.{}.self_attn.k_norm.weight",
    "layers.{}.attention.value.kernel": "model.layers.{}.self_attn.v_proj.weight",
    "layers.{}.attention.value.bias": "model.layers.{}.self_attn.v_proj.bias",
    "layers.{}.attention.out.kernel": "model.layers.{}.self_attn.o_proj.weight",
    "layers.{}.attention.out.bias": "model.layers.{}.self_attn.o_proj.bias",
    "layers.{}.feed_forward_norm.scale": "model.layers.{}.post_attention_layernorm.weight",
    "layers.{}.gate.kernel": "model.layers.{}.mlp.gate_proj.weight",
    "layers.{}.up.kernel": "model.layers.{}.mlp.up_proj.weight",
    "layers.{}.down.kernel": "model.layers.{}.mlp.down_proj.weight",
    "output_norm.scale": "model.norm.weight",
    "unembedding.kernel": "lm_head.weight",
}

# Frequencies of rotary embedding, which old files hold and the configuration says as well.
BUFFER = ".self_attn.rotary_emb.inv_freq"

# What a rotary embedding may say of itself, and what each kind of it besides.
ROTARY_FIELDS = ("rope_theta", "rope_type", "type", "partial_rotary_factor")
SCALINGS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "truncate",
    ),
}

# The types of numbers that weights may have, and the format's names for them.
DTYPES = ("F32", "BF16", "F16")

Windows = tuple[tuple[int, int] | None, ...]


class HuggingFaceFolder:
    """One folder; all but its configuration is read when it is asked for."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
          WeightsError: there is no configuration, or one of another kind of model.
        """
        self._path = path
        self._config = _read_json(path / "config.json")
        self._kind = self._config.one_of("model_type", ("llama", "qwen3"))

    def config(self) -> DecoderConfig:
        """What config.json says of the decoder."""
        config = self._config
        self._refuse_other_models()
        num_layers = config.get("num_hidden_layers", int)
        features = config.get("hidden_size", int)
        query_heads = config.get("num_attention_heads", int)
        epsilon = config.get("rms_norm_eps", float)
        try:
            windows = self._windows(num_layers)
            are_alike = len(set(windows)) == 1
            return DecoderConfig(
                vocabulary_size=config.get("vocab_size", int),
                context_length=config.get("max_position_embeddings", int),
                num_layers=num_layers,
                feed_forward_size=config.get("intermediate_size", int),
                rms_epsilon=epsilon,
                attention=AttentionConfig(
                    features=features,
                    num_query_heads=query_heads,
                    num_key_value_heads=config.get("num_key_value_heads", int, query_heads),
                    head_dim=config.get("head_dim", int, features // max(query_heads, 1)),
                    use_bias=config.get("attention_bias", bool, False),
                    norm_epsilon=epsilon if self._kind == "qwen3" else None,
                    rotary=self._rotary(),
                    local_window_size=windows[0] if are_alike else None,
                ),
                has_tied_embeddings=config.get("tie_word_embeddings", bool, False),
                windows=None if are_alike else windows,
            )
        except ValueError as error:
            raise WeightsError(f"{config.source} describes no decoder: {error}") from error

    def decoder(self, dtype: DTypeLike) -> Decoder:
        """The weights, cast to `dtype`."""
        config = self.config()
        tensors = {name: x for name, x in self._tensors().items() if not name.endswith(BUFFER)}
        name = NAMES["unembedding.kernel"]
        if config.has_tied_embeddings and name in tensors:
            # Some files hold one matrix twice.
            unembedding, embedding = tensors.pop(name), tensors.get(NAMES["embedding.embedding"])
            if embedding and not np.array_equal(unembedding.read(), embedding.read()):
                raise WeightsError(
                    f"{self._config.source} has tie_word_embeddings = True, but {name!r} of the "
                    "weights is another matrix than the embedding"
                )
        return fill(config, NAMES, tensors, dtype)

    def tokenizer(self) -> Tokenizer:
        """What tokenizer.json describes."""
        path = self._path / "tokenizer.json"
        if not path.is_file():
            raise WeightsError(f"there is no {path}")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        # The library has no errors of its own.
        except Exception as error:
            raise WeightsError(f"{path} describes no tokenizer: {error}") from error
        # Left from training, and not of the model.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def chat_template(self) -> str | None:
        """Of Jinja."""
        path = self._path / "chat_template.jinja"
        if path.is_file():
            return _read_text(path)
        return self._optional_json("tokenizer_config.json").optional("chat_template", str)

    def special_tokens(self) -> dict[str, str]:
        """What tokenizer_config.json calls them: a text, or an object with one as its content."""
        config = self._optional_json("tokenizer_config.json")
        tokens = {}
        for name in ("bos_token", "eos_token"):
            x = config.values.get(name)
            x = x.get("content") if isinstance(x, dict) else x
            if isinstance(x, str):
                tokens[name] = x
            elif config.values.get(name) is not None:
                raise config.unexpected(name, "a string or an object with one as its content")
        return tokens

    def stop_tokens(self) -> frozenset[int]:
        """Ends of a text and of a turn, as far as any are known."""
        name = "eos_token_id"
        source = self._optional_json("generation_config.json")
        if source.values.get(name) is None:
            source = self._config
        ids = source.values.get(name)
        ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise source.unexpected(name, "a whole number or a list of them")
        return frozenset(ids)

    def _refuse_other_models(self) -> None:
        """What would give other numbers than a decoder's."""
        config = self._config
        config.one_of("hidden_act", ("silu",))
        config.one_of("mlp_bias", (False,), False)
        config.one_of("pretraining_tp", (1,), 1)
        config.one_of("partial_rotary_factor", (1.0,), 1.0)
        config.refuse("quantization_config", "original_max_position_embeddings")
        if self._kind == "llama":
            config.one_of("use_sliding_window", (False,), False)
            config.refuse("sliding_window")

    def _windows(self, num_layers: int) -> Windows:
        """Of each layer."""
        config = self._config
        if self._kind == "llama":
            return (None,) * num_layers
        is_used = config.get("use_sliding_window", bool, False)
        kinds = config.optional("layer_types", list)
        if kinds is None:
            first = config.get("max_window_layers", int) if is_used else num_layers
            kinds = [
                "sliding_attention" if index >= first else "full_attention"
                for index in range(num_layers)
            ]
        allowed = ("full_attention", "sliding_attention") if is_used else ("full_attention",)
        if len(kinds) != num_layers or not all(kind in allowed for kind in kinds):
            expected = f"{num_layers} of {' or '.join(allowed)}"
            raise config.unexpected("layer_types", expected)
        if "sliding_attention" not in kinds:
            return (None,) * num_layers
        width = config.get("sliding_window", int)
        if width < 1:
            raise config.unexpected("sliding_window", "at least 1")
        # A token sees so many, itself included.
        window = {"full_attention": None, "sliding_attention": (width - 1, 0)}
        return tuple(window[kind] for kind in kinds)

    def _rotary(self) -> RotaryEmbedding:
        """From `rope_parameters`, or `rope_theta` and `rope_scaling` of older files."""
        config = self._config
        parameters, scaling = (
            config.optional(name, dict) for name in ("rope_parameters", "rope_scaling")
        )
        if parameters is not None and scaling is not None:
            raise config.unexpected("rope_scaling", "none beside rope_parameters")
        rope = Metadata(f"the rotary embedding of {config.source}", parameters or scaling or {})
        base = config.optional("rope_theta", float)
        if base is not None:
            rope.one_of("rope_theta", (base,), base)
        base = rope.get("rope_theta", float, 10000.0 if base is None else base)
        # The second is what the first was once called; a file may have both.
        name = "type" if rope.values.get("rope_type") is None else "rope_type"
        kind = rope.one_of(name, tuple(SCALINGS), "default")
        rope.one_of("type", (kind,), kind)
        rope.one_of("partial_rotary_factor", (1.0,), 1.0)
        rope.refuse_others({*ROTARY_FIELDS, *SCALINGS[kind]})
        return RotaryEmbedding(base, self._scaling(kind, rope))

    def _scaling(self, kind: str, rope: Metadata) -> RotaryScaling | None:
        if kind == "default":
            return None
        factor = rope.get("factor", float)
        if kind == "linear":
            return LinearScaling(factor)
        context_length = self._config.get("max_position_embeddings", int)
        length = rope.get("original_max_position_embeddings", int, context_length)
        if kind == "llama3":
            low, high = (rope.get(f"{wave}_freq_factor", float) for wave in ("low", "high"))
            return Llama3Scaling(factor, low, high, length)
        rope.one_of("truncate", (True,), True)
        return YarnScaling(
            factor,
            length,
            fast_turns=rope.get("beta_fast", float, 32.0),
            slow_turns=rope.get("beta_slow", float, 1.0),
            attention_factor=rope.optional("attention_factor", float),
        )

    def _optional_json(self, name: str) -> Metadata:
        """An object without fields, where there is no such file."""
        path = self._path / name
        return _read_json(path) if path.is_file() else Metadata(str(path), {})

    def _tensors(self) -> dict[str, Tensor]:
        """Of all files with weights."""
        path = self._path / "model.safetensors"
        if path.is_file():
            return _read_tensors(path)
        index = path.with_name("model.safetensors.index.json")
        if not index.is_file():
            raise WeightsError(f"there is neither {path} nor {index}")
        metadata = _read_json(index)
        file_of = metadata.get("weight_map", dict)
        if not all(isinstance(file, str) and Path(file).name == file for file in file_of.values()):
            raise metadata.unexpected("weight_map", "names of files in the same folder")
        tensors = {}
        for file in sorted(set(file_of.values())):
            tensors_of_file = _read_tensors(self._path / file)
            for name in tensors_of_file:
                if file_of.get(name) != file:
                    raise WeightsError(f"{index} does not have tensor {name!r} in {file}")
            tensors |= tensors_of_file
        for name in file_of:
            if name not in tensors:
                raise WeightsError(
                    f"{index} has tensor {name!r} in {file_of[name]}, which has none such"
                )
        return tensors


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """Of one file."""
    tensors = {}
    try:
        with safe_open(path, framework="numpy") as file:
            names = file.keys()
            for name in names:
                part = file.get_slice(name)
                if part.get_dtype() not in DTYPES:
                    raise WeightsError(
                        f"tensor {name!r} in {path} is {part.get_dtype()}, expected one of "
                        f"{', '.join(DTYPES)}"
                    )
                tensors[name] = Tensor(tuple(part.get_shape()), partial(_read_tensor, path, name))
    except OSError as error:
        raise WeightsError(f"cannot read weights file {path}: {error}") from error
    except SafetensorError as error:
        raise WeightsError(
            f"weights file {path} is truncated or not in the safetensors format: {error}"
        ) from error
    return tensors


def _read_tensor(path: Path, name: str) -> np.ndarray:
    # JAX has taught NumPy bfloat16.
    with safe_open(path, framework="numpy") as file:
        return file.get_tensor(name)


def _read_json(path: Path) -> Metadata:
    """The object in a file."""
    text = _read_text(path)
    try:
        values = json.loads(text)
    except ValueError as error:
        raise WeightsError(f"{path} is broken: {error}") from error
    if not isinstance(values, dict):
        raise WeightsError(f"{path} holds {values!r:.80}, expected an object")
    return Metadata(str(path), values)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise WeightsError(f"{path} is no text: {error}") from error
