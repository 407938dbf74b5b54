"""Tiny models, written in both formats, load alike; what `Decoder` is not made for is refused."""

import json
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf_file import GGUFFile
from loading import WeightsError, load, load_decoder
from safetensors.numpy import load_file, save_file
from text import render_chat, stream_text
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pallas_flash.flax import LinearScaling, Llama3Scaling, RotaryEmbedding, YarnScaling

FEATURES, HEADS, LAYERS, VOCABULARY, FEED_FORWARD = 8, 2, 2, 20, 12

# Fields of config.json: one key/value head, and in Qwen3 a head dim of its own.
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": FEATURES,
    "intermediate_size": FEED_FORWARD,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    # A float32 has it exactly, and GGUF has no others.
    "rms_norm_eps": 2.0**-17,
    "rope_theta": 500.0,
}
QWEN3 = LLAMA | {"model_type": "qwen3", "head_dim": 6}
# The same in GGUF, after the architecture's name.
METADATA = {
    "vocab_size": VOCABULARY,
    "embedding_length": FEATURES,
    "feed_forward_length": FEED_FORWARD,
    "block_count": LAYERS,
    "attention.head_count": HEADS,
    "attention.head_count_kv": 1,
    "context_length": 64,
    "attention.layer_norm_rms_epsilon": 2.0**-17,
    "rope.freq_base": 500.0,
}

WINDOW = {"use_sliding_window": True, "sliding_window": 3}

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.fixture
def folder(tmp_path: Path, rng: np.random.Generator) -> Path:
    """A Llama in Hugging Face's layout."""
    write_folder(tmp_path / "model", LLAMA, make_tensors(LLAMA, rng))
    return tmp_path / "model"


def make_tensors(config: dict[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random weights by the names of transformers, each matrix [outputs, inputs]."""
    head_dim = config.get("head_dim", FEATURES // HEADS)
    shapes = {"model.embed_tokens.weight": (VOCABULARY, FEATURES), "model.norm.weight": (FEATURES,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (VOCABULARY, FEATURES)
    for layer in (f"model.layers.{index}" for index in range(LAYERS)):
        rows = {"q": HEADS * head_dim, "k": head_dim, "v": head_dim, "o": FEATURES}
        for part, outputs in rows.items():
            inputs = HEADS * head_dim if part == "o" else FEATURES
            shapes[f"{layer}.self_attn.{part}_proj.weight"] = (outputs, inputs)
            if config.get("attention_bias"):
                shapes[f"{layer}.self_attn.{part}_proj.bias"] = (outputs,)
        if config["model_type"] == "qwen3":
            shapes |= {f"{layer}.self_attn.{part}_norm.weight": (head_dim,) for part in "qk"}
        shapes |= {
            f"{layer}.input_layernorm.weight": (FEATURES,),
            f"{layer}.post_attention_layernorm.weight": (FEATURES,),
            f"{layer}.mlp.gate_proj.weight": (FEED_FORWARD, FEATURES),
            f"{layer}.mlp.up_proj.weight": (FEED_FORWARD, FEATURES),
            f"{layer}.mlp.down_proj.weight": (FEATURES, FEED_FORWARD),
        }
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write_folder(path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    path.mkdir()
    write_json(path / "config.json", config)
    save_file(tensors, path / "model.safetensors")


def write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values))


def change_config(folder: Path, changes: dict[str, Any]) -> None:
    """A field that changes to None is left out."""
    config = LLAMA | changes
    write_json(folder / "config.json", {name: x for name, x in config.items() if x is not None})


def write_gguf(
    path: Path,
    kind: str,
    tensors: dict[str, np.ndarray],
    metadata: dict[str, Any] | None = None,
    more: dict[str, np.ndarray] | None = None,
) -> None:
    """Weights that have the names of transformers, and more that have GGUF's."""
    writer = gguf.GGUFWriter(path, kind)
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    values = {f"{kind}.{name}": x for name, x in METADATA.items()} | (metadata or {})
    for name, x in values.items():
        if x is not None:
            add[type(x)](name, x)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], LAYERS)
    for name, tensor in tensors.items():
        if kind == "llama" and name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
            tensor = as_llama_cpp_stores(tensor, HEADS if ".q_proj." in name else 1)
        writer.add_tensor(str(names.get_name(name, (".weight", ".bias"))), tensor)
    for name, tensor in (more or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def as_llama_cpp_stores(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys, of which the two that make a pair follow one another."""
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)


def assert_same(ours, expected) -> None:
    assert ours.config == expected.config
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y, strict=True)


def refusal(path: Path) -> str:
    """The one line that says why there is no decoder in it."""
    with pytest.raises(WeightsError) as info:
        load_decoder(path)
    assert "\n" not in str(info.value)
    return str(info.value)


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        LLAMA | {"attention_bias": True, "tie_word_embeddings": True},
        QWEN3,
        QWEN3 | {"tie_word_embeddings": True},
    ],
)
def test_both_formats_load_alike(
    tmp_path: Path, rng: np.random.Generator, config: dict[str, Any]
) -> None:
    tensors = make_tensors(config, rng)
    write_folder(tmp_path / "folder", config, tensors)
    kind = config["model_type"]
    head_dim = config.get("head_dim", 4)
    lengths = {f"{kind}.attention.{x}_length": head_dim for x in ("key", "value")}
    write_gguf(tmp_path / "file", kind, tensors, lengths)
    assert_same(load_decoder(tmp_path / "file"), load_decoder(tmp_path / "folder"))


def test_parameters_do_what_the_matrices_did(folder: Path, rng: np.random.Generator) -> None:
    tensors = make_tensors(LLAMA | {"attention_bias": True}, rng)
    change_config(folder, {"attention_bias": True})
    save_file(tensors, folder / "model.safetensors")
    decoder = load_decoder(folder)
    attention = "model.layers.1.self_attn"
    hidden = rng.standard_normal((1, 3, FEATURES), np.float32)
    layer = decoder.layers[1]
    for part, ours in (
        (f"{attention}.q_proj", layer.attention.query),
        (f"{attention}.k_proj", layer.attention.key),
        (f"{attention}.v_proj", layer.attention.value),
        (f"{attention}.o_proj", lambda x: layer.attention.out(x.reshape(1, 3, HEADS, -1))),
        ("model.layers.1.mlp.gate_proj", layer.gate),
        ("model.layers.1.mlp.up_proj", layer.up),
        ("lm_head", decoder.logits),
    ):
        expected = hidden @ tensors[f"{part}.weight"].T + tensors.get(f"{part}.bias", 0)
        out = ours(jnp.asarray(hidden)).reshape(expected.shape)
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)


def test_several_files_load_as_one(folder: Path) -> None:
    expected = load_decoder(folder)
    split_in_two(folder)
    assert_same(load_decoder(folder), expected)


def split_in_two(folder: Path) -> dict[str, str]:
    """Puts the weights into two files; gives which is where."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    file_of = {name: f"{index % 2}.safetensors" for index, name in enumerate(tensors)}
    for file in ("0.safetensors", "1.safetensors"):
        save_file({name: x for name, x in tensors.items() if file_of[name] == file}, folder / file)
    write_index(folder, file_of)
    return file_of


def write_index(folder: Path, file_of: dict[str, Any]) -> None:
    write_json(folder / "model.safetensors.index.json", {"weight_map": file_of})


@pytest.mark.parametrize("stored", [np.float32, np.float16, jnp.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_parameters_are_cast(folder: Path, stored: Any, dtype: str) -> None:
    tensors = {
        name: x.astype(stored) for name, x in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors")
    decoder = load_decoder(folder, dtype)
    assert {str(x.dtype) for x in jax.tree.leaves(decoder)} == {dtype}
    expected = tensors["model.embed_tokens.weight"].astype(dtype)
    np.testing.assert_array_equal(decoder.embedding.embedding[...], expected)


def test_a_decoder_computes_in_the_dtype_of_its_parameters(folder: Path) -> None:
    decoder = load_decoder(folder, "bfloat16")
    # Flax's norms promote to float32 inside.
    with jax.numpy_dtype_promotion("standard"):
        hidden, caches = decoder.prefill(jnp.ones((1, 2), jnp.int32), capacity=4)
    of = [hidden, decoder.logits(hidden), *jax.tree.leaves(caches.pairs)]
    assert {str(x.dtype) for x in of} == {"bfloat16"}


def test_a_dtype_that_is_none_of_a_decoders_is_an_error(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"dtype: expected one of float32.*, got 'int8'"):
        load_decoder(folder, "int8")


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.BF16])
def test_quantised_weights_are_dequantised(
    tmp_path: Path, rng: np.random.Generator, kind: gguf.GGMLQuantizationType
) -> None:
    # Blocks are of 32 numbers.
    matrix = rng.uniform(-1, 1, (VOCABULARY, 32)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "file", "llama")
    writer.add_tensor("token_embd.weight", gguf.quantize(matrix, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = GGUFFile(tmp_path / "file").tensors["token_embd.weight"]
    assert tensor.shape == matrix.shape
    # Half a step of 1/127 at most, and the step is a float16.
    np.testing.assert_allclose(tensor.read(), matrix, rtol=0, atol=1 / 254 + 2**-11)


def test_rotary_embedding_is_that_of_the_configuration(folder: Path) -> None:
    def rotary(**changes: Any) -> RotaryEmbedding | None:
        change_config(folder, changes)
        return load_decoder(folder).config.attention.rotary

    assert rotary() == RotaryEmbedding(500.0)
    assert rotary(rope_theta=None) == RotaryEmbedding(10000.0)
    linear = {"type": "linear", "factor": 2}
    assert rotary(rope_scaling=linear) == RotaryEmbedding(500.0, LinearScaling(2.0))
    llama3 = RotaryEmbedding(500.0, Llama3Scaling(8.0, 1.0, 4.0, 16))
    assert rotary(rope_scaling=LLAMA3) == llama3
    # As transformers writes it from its fifth release on.
    new = LLAMA3 | {"rope_theta": 500.0}
    assert rotary(rope_theta=None, rope_parameters=new) == llama3
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert rotary(rope_scaling=yarn) == RotaryEmbedding(500.0, YarnScaling(4.0, 64))
    yarn |= {
        "type": "yarn",
        "original_max_position_embeddings": 16,
        "beta_fast": 20,
        "beta_slow": 2.0,
        "attention_factor": 1.5,
        "truncate": True,
    }
    expected = RotaryEmbedding(500.0, YarnScaling(4.0, 16, 20.0, 2.0, 1.5))
    assert rotary(rope_scaling=yarn) == expected


def test_rotary_embedding_is_that_of_the_file(tmp_path: Path, rng: np.random.Generator) -> None:
    tensors = make_tensors(LLAMA, rng)

    def rotary(more: dict[str, np.ndarray] | None = None, **scaling: Any) -> RotaryEmbedding:
        metadata = {f"llama.rope.scaling.{name}": x for name, x in scaling.items()}
        write_gguf(tmp_path / "file", "llama", tensors, metadata, more)
        rotary = load_decoder(tmp_path / "file").config.attention.rotary
        assert rotary is not None
        return rotary

    assert rotary() == RotaryEmbedding(500.0)
    assert rotary(type="none") == RotaryEmbedding(500.0)
    linear = RotaryEmbedding(500.0, LinearScaling(2.0))
    assert rotary(type="linear", factor=2.0) == rotary(factor=2.0) == linear
    yarn = rotary(type="yarn", factor=4.0, original_context_length=16)
    assert yarn == RotaryEmbedding(500.0, YarnScaling(4.0, 16))
    # Of two frequencies, 1 and 500^(-1/2), the second has a wave of 140 positions, over 16.
    by_file = rotary({"rope_freqs.weight": np.array([1.0, 8.0], np.float32)})
    expected, _ = RotaryEmbedding(500.0, Llama3Scaling(8.0, 1.0, 4.0, 16)).frequencies(4)
    assert expected[1] < 500**-0.5 / 7
    frequencies, factor = by_file.frequencies(4)
    assert factor == 1.0
    np.testing.assert_allclose(frequencies[1], expected[1], rtol=1e-6)
    assert frequencies[0] == 1.0


@pytest.mark.parametrize(
    ("changes", "of_all", "of_each"),
    [
        ({"use_sliding_window": False, "sliding_window": 3, "max_window_layers": 0}, None, None),
        ({**WINDOW, "max_window_layers": 0}, (2, 0), None),
        ({**WINDOW, "max_window_layers": 1}, None, (None, (2, 0))),
        ({**WINDOW, "max_window_layers": 2}, None, None),
        ({**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}, None, ((2, 0), None)),
        ({"layer_types": ["full_attention"] * 2}, None, None),
    ],
)
def test_windows_are_those_of_the_configuration(
    tmp_path: Path, rng: np.random.Generator, changes: dict[str, Any], of_all: Any, of_each: Any
) -> None:
    write_folder(tmp_path / "folder", QWEN3 | changes, make_tensors(QWEN3, rng))
    config = load_decoder(tmp_path / "folder").config
    assert (config.attention.local_window_size, config.windows) == (of_all, of_each)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "mistral"}, "model_type = 'mistral', expected 'llama' or 'qwen3'"),
        ({"model_type": None}, "no field 'model_type'"),
        ({"hidden_size": None}, "no field 'hidden_size'"),
        ({"hidden_size": "8"}, "hidden_size = '8', expected a whole number"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers = 2.0, expected a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers = True, expected a whole number"),
        ({"num_hidden_layers": 0}, "num_layers must be positive, got 0"),
        ({"num_attention_heads": 0}, "num_query_heads: expected an int >= 1, got 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor"),
        ({"head_dim": 3}, "head_dim: expected an even int"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan, expected a finite number"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps = '1e-5', expected a finite number"),
        ({"attention_bias": 1}, "attention_bias = 1, expected true or false"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu', expected 'silu'"),
        ({"mlp_bias": True}, "mlp_bias = True, expected False"),
        ({"pretraining_tp": 2}, "pretraining_tp = 2, expected 1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5, expected 1.0"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4}, which is not"),
        ({"use_sliding_window": True}, "use_sliding_window = True, expected False"),
        ({"sliding_window": 4}, "sliding_window = 4, which is not supported"),
        ({"original_max_position_embeddings": 32}, "original_max_position_embeddings = 32"),
        ({"rope_theta": 1.0}, "base: expected a number above 1, got 1.0"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "type = 'dynamic', expected 'default'",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "no field 'factor'"),
        ({"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}}, "type = 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 0.0}}, "factor: expected a finite number"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 2.0}}, "beta_fast = 2.0"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 1.0}}, "mscale = 1.0, which"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, "truncate = False"),
        ({"rope_scaling": {"rope_type": "default", "factor": 2.0}}, "factor = 2.0, which is not"),
        ({"rope_scaling": {"rope_theta": 600.0}}, "rope_theta = 600.0, expected 500.0"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_frequency_factor: expected"),
        ({"rope_scaling": {}, "rope_parameters": {}}, "none beside rope_parameters"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"full_attention": {}}}, "full_attention = {}, which is not"),
        ({"rope_parameters": "linear"}, "rope_parameters = 'linear', expected an object"),
        ({"tie_word_embeddings": True}, "'lm_head.weight' of the weights is another matrix"),
        ({"attention_bias": True}, "no tensor 'model.layers.0.self_attn.k_proj.bias'"),
        ({"num_hidden_layers": 3}, "no tensor 'model.layers.2."),
        ({"num_hidden_layers": 1}, "tensor 'model.layers.1.input_layernorm.weight', which has no"),
        ({"intermediate_size": 13}, "down_proj.weight' of the weights has shape [8, 12], expected"),
        ({"num_key_value_heads": 2}, "k_proj.weight' of the weights has shape [4, 8], expected"),
        # A Qwen3 has norms of queries and keys, and windows that say what they are.
        ({"model_type": "qwen3"}, "no tensor 'model.layers.0.self_attn.k_norm.weight'"),
        ({"model_type": "qwen3", **WINDOW}, "no field 'max_window_layers'"),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 0},
            "no field 'sliding_window'",
        ),
        (
            {"model_type": "qwen3", **WINDOW, "max_window_layers": 0, "sliding_window": 0},
            "sliding_window = 0, expected at least 1",
        ),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]},
            "expected 2 of full_attention",
        ),
        (
            {"model_type": "qwen3", **WINDOW, "layer_types": ["full_attention", ["chunked"]]},
            "expected 2 of full_attention or sliding_attention",
        ),
        (
            {"model_type": "qwen3", **WINDOW, "layer_types": ["full_attention"]},
            "expected 2 of full_attention or sliding_attention",
        ),
    ],
)
def test_a_configuration_of_another_model_is_refused(
    folder: Path, changes: dict[str, Any], reason: str
) -> None:
    change_config(folder, changes)
    error = refusal(folder)
    assert reason in error
    assert str(folder / "config.json") in error or "tensor '" in error


def test_tied_weights_may_be_there_twice(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors")
    change_config(folder, {"tie_word_embeddings": True})
    decoder = load_decoder(folder)
    assert not hasattr(decoder, "unembedding")


def test_frequencies_among_the_weights_are_passed_over(folder: Path) -> None:
    expected = load_decoder(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    save_file(tensors, folder / "model.safetensors")
    assert_same(load_decoder(folder), expected)


def test_weights_that_do_not_fit_are_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    path = folder / "model.safetensors"
    save_file(tensors | {"score.weight": np.ones((2, FEATURES), np.float32)}, path)
    assert "tensor 'score.weight', which has no place" in refusal(folder)
    save_file(tensors | {"model.norm.weight": np.ones(FEATURES, np.int8)}, path)
    assert f"'model.norm.weight' in {path} is I8, expected one of F32, BF16, F16" in refusal(folder)
    del tensors["model.norm.weight"]
    save_file(tensors, path)
    assert "no tensor 'model.norm.weight'" in refusal(folder)


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_truncated_file_of_weights_is_refused(folder: Path, size: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert f"weights file {path} is truncated or not in the safetensors format" in refusal(folder)


def test_an_index_that_is_wrong_is_refused(folder: Path) -> None:
    file_of = split_in_two(folder)
    name = next(iter(file_of))
    for wrong, reason in (
        (file_of | {name: "1.safetensors"}, f"does not have tensor {name!r} in 0.safetensors"),
        (file_of | {name: "2.safetensors"}, f"does not have tensor {name!r} in 0.safetensors"),
        (file_of | {"more": "1.safetensors"}, "has tensor 'more' in 1.safetensors, which has none"),
        (file_of | {"more": "2.safetensors"}, f"cannot read weights file {folder / '2.safeten'}"),
        (file_of | {name: f"../{folder.name}/0.safetensors"}, "names of files in the same folder"),
        (file_of | {name: ["0.safetensors"]}, "names of files in the same folder"),
    ):
        write_index(folder, wrong)
        assert reason in refusal(folder)
    del file_of[name]
    write_index(folder, file_of)
    assert f"does not have tensor {name!r} in 0.safetensors" in refusal(folder)
    write_json(folder / "model.safetensors.index.json", {})
    assert "no field 'weight_map'" in refusal(folder)


def test_files_that_are_not_there_are_named(tmp_path: Path, folder: Path) -> None:
    assert f"cannot read weights file {tmp_path / 'none'}: No such file" in refusal(
        tmp_path / "none"
    )
    assert f"cannot read {tmp_path / 'config.json'}: No such file" in refusal(tmp_path)
    (folder / "model.safetensors").unlink()
    assert f"neither {folder / 'model.safetensors'} nor" in refusal(folder)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"{", "is broken"), (b"[1]", "holds [1], expected an object"), (b"\xff", "is no text")],
)
def test_a_broken_configuration_is_refused(folder: Path, content: bytes, reason: str) -> None:
    (folder / "config.json").write_bytes(content)
    assert f"{folder / 'config.json'} {reason}" in refusal(folder)


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"llama.embedding_length": None}, "no field 'embedding_length'"),
        ({"llama.embedding_length": "8"}, "embedding_length = '8', expected a whole number"),
        ({"llama.block_count": 0}, "num_layers must be positive, got 0"),
        ({"llama.attention.key_length": 6}, "blk.0.attn_k.weight' of the weights has shape [4, 8]"),
        ({"llama.attention.value_length": 2}, "attention.value_length = 2, expected 4"),
        ({"llama.rope.dimension_count": 2}, "rope.dimension_count = 2, expected 4"),
        ({"llama.attention.sliding_window": 8}, "attention.sliding_window = 8, which is not"),
        ({"llama.expert_count": 4}, "expert_count = 4, which is not supported"),
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type = 'longrope', expected"),
        ({"llama.rope.scaling.type": "linear"}, "no field 'rope.scaling.factor'"),
        (
            {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 2.0},
            "rope.scaling.factor = 2.0, which is not supported",
        ),
        ({"llama.rope.scaling.attn_factor": 2.0}, "rope.scaling.attn_factor = 2.0, which is not"),
        ({"llama.vocab_size": 21}, "'token_embd.weight' of the weights has shape [20, 8]"),
    ],
)
def test_a_gguf_file_of_another_model_is_refused(
    tmp_path: Path, rng: np.random.Generator, metadata: dict[str, Any], reason: str
) -> None:
    write_gguf(tmp_path / "file", "llama", make_tensors(LLAMA, rng), metadata)
    assert reason in refusal(tmp_path / "file")


def test_a_gguf_file_with_other_tensors_is_refused(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path, tensors = tmp_path / "file", make_tensors(LLAMA, rng)
    for tensor, metadata, reason in (
        (np.ones(3), {}, "expected 2 finite numbers above 0, got (1.0, 1.0, 1.0)"),
        (np.zeros(2), {}, "expected 2 finite numbers above 0, got (0.0, 0.0)"),
        (np.ones(2), {"llama.rope.scaling.factor": 2.0}, "none beside rope_freqs.weight"),
    ):
        more = {"rope_freqs.weight": tensor.astype(np.float32)}
        write_gguf(path, "llama", tensors, metadata, more)
        assert reason in refusal(path)
    write_gguf(path, "llama", tensors, more={"cls.weight": np.ones(2, np.float32)})
    assert "tensor 'cls.weight', which has no place" in refusal(path)
    write_gguf(path, "llama", tensors, more={"blk.0.attn_q.bias": np.ones(8, np.float32)})
    assert "no tensor 'blk.0.attn_k.bias'" in refusal(path)
    write_gguf(path, "llama", tensors | {"model.norm.weight": np.ones(FEATURES, np.int32)})
    assert "tensor 'output_norm.weight' of the weights is I32, which is not" in refusal(path)
    del tensors["model.norm.weight"]
    write_gguf(path, "llama", tensors)
    assert "no tensor 'output_norm.weight'" in refusal(path)
    write_gguf(path, "qwen2", tensors)
    assert "general.architecture = 'qwen2', expected 'llama' or 'qwen3'" in refusal(path)


def write_tokenizer(folder: Path) -> None:
    """Of single letters."""
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate("abcdefgh")}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["<end>", "<turn>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def test_a_folder_gives_what_belongs_to_text(folder: Path) -> None:
    write_tokenizer(folder)
    change_config(folder, {"eos_token_id": 8})
    model = load(folder)
    assert model.config is model.decoder.config
    assert model.tokenizer.encode("cab<end>").ids == [2, 0, 1, 8]
    assert (model.chat_template, model.stop_tokens) == (None, {8})
    assert model.special_tokens == {}
    special = {"bos_token": {"content": "<turn>", "lstrip": False}, "eos_token": "<end>"}
    write_json(folder / "tokenizer_config.json", {"chat_template": "old", **special})
    write_json(folder / "generation_config.json", {"eos_token_id": [8, 9]})
    model = load(folder)
    assert (model.chat_template, model.stop_tokens) == ("old", {8, 9})
    assert model.special_tokens == {"bos_token": "<turn>", "eos_token": "<end>"}
    (folder / "chat_template.jinja").write_text("new")
    write_json(folder / "generation_config.json", {"temperature": 0.6})
    model = load(folder)
    assert (model.chat_template, model.stop_tokens) == ("new", {8})
    change_config(folder, {})
    assert load(folder).stop_tokens == frozenset()


def test_a_text_is_neither_cut_nor_padded(folder: Path) -> None:
    write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=5)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert load(folder).tokenizer.encode("cab").ids == [2, 0, 1]


def test_what_belongs_to_text_is_refused_where_it_is_broken(folder: Path) -> None:
    def error() -> str:
        with pytest.raises(WeightsError) as info:
            load(folder)
        return str(info.value)

    assert f"there is no {folder / 'tokenizer.json'}" in error()
    write_json(folder / "tokenizer.json", {"model": "none"})
    assert f"{folder / 'tokenizer.json'} describes no tokenizer" in error()
    write_tokenizer(folder)
    for name, values, reason in (
        (
            "tokenizer_config.json",
            {"chat_template": ["a"]},
            "chat_template = ['a'], expected a str",
        ),
        ("tokenizer_config.json", {"bos_token": {"text": "<turn>"}}, "bos_token = {'text'"),
        ("generation_config.json", {"eos_token_id": "8"}, "eos_token_id = '8', expected a whole"),
        ("generation_config.json", {"eos_token_id": [8, True]}, "eos_token_id = [8, True]"),
    ):
        write_json(folder / name, values)
        assert reason in error()
        (folder / name).unlink()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([f"<{i}>" for i in range(VOCABULARY)])
    tokenizer.save(str(folder / "tokenizer.json"))
    assert "has token 29, but the model only 20 tokens" in error()


def test_a_chat_template_gets_what_it_asks_for() -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    template += "{{ eos_token }}{{ add_generation_prompt }}"
    assert render_chat(template, "Hi", {"bos_token": "<s>"}) == "<s>user: HiTrue"
    assert render_chat("{{ messages[0] | tojson }}", "a<b & c's é", {}) == (
        '{"role": "user", "content": "a<b & c\'s é"}'
    )


@pytest.mark.parametrize(
    "template",
    [
        "{% for %}",
        "{{ raise_exception('no system message') }}",
        "{{ unknown() }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ '\\ud800' }}",
    ],
)
def test_a_chat_template_that_fails_is_refused(template: str) -> None:
    with pytest.raises(WeightsError, match="the chat template does not work: "):
        render_chat(template, "Hi", {})


def test_streamed_text_keeps_the_spaces_of_a_decoder_that_strips() -> None:
    words = [
        "\N{LOWER ONE EIGHTH BLOCK}The",
        "\N{LOWER ONE EIGHTH BLOCK}sky",
        "s",
        "<0xC3>",
        "<0xA9>",
    ]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokens = [0, 1, 2, 1, 3, 4, 1, 3]
    pieces = list(stream_text(tokenizer, tokens))
    assert "".join(pieces) == tokenizer.decode(tokens)
    assert pieces == ["The", " sky", "s", " sky", "\u00e9", " sky", "\N{REPLACEMENT CHARACTER}"]


TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<|endoftext|>", "<end>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 4,
}


def test_a_gguf_file_gives_what_belongs_to_text(tmp_path: Path, rng: np.random.Generator) -> None:
    path, tensors = tmp_path / "file", make_tensors(LLAMA, rng)
    write_gguf(path, "llama", tensors, TOKENIZER)
    model = load(path)
    assert model.tokenizer.encode("bab<end>").ids == [1, 2, 4]
    assert (model.chat_template, model.stop_tokens) == (None, {3, 4})
    assert model.special_tokens == {"eos_token": "<end>"}
    more = {
        "tokenizer.chat_template": "chat",
        "tokenizer.ggml.eot_token_id": 0,
        "tokenizer.ggml.bos_token_id": 3,
    }
    write_gguf(path, "llama", tensors, TOKENIZER | more)
    model = load(path)
    assert (model.chat_template, model.stop_tokens) == ("chat", {0, 3, 4})
    assert model.special_tokens == {"bos_token": "<|endoftext|>", "eos_token": "<end>"}


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model = 'llama', expected 'gpt2'"),
        (
            {"tokenizer.ggml.pre": "llama-bpe"},
            "tokenizer.ggml.pre = 'llama-bpe', expected 'smollm'",
        ),
        ({"tokenizer.ggml.add_bos_token": True}, "add_bos_token = True, expected False"),
        ({"tokenizer.ggml.eos_token_id": None}, "no field 'tokenizer.ggml.eos_token_id'"),
        ({"tokenizer.ggml.bos_token_id": 5}, "bos_token_id = 5, expected one of 5 tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "describes no tokenizer"),
        ({"tokenizer.ggml.merges": ["ab"]}, "describes no tokenizer"),
        ({"tokenizer.ggml.merges": ["x y"]}, "describes no tokenizer"),
    ],
)
def test_a_gguf_file_with_another_tokenizer_is_refused(
    tmp_path: Path, rng: np.random.Generator, metadata: dict[str, Any], reason: str
) -> None:
    write_gguf(tmp_path / "file", "llama", make_tensors(LLAMA, rng), TOKENIZER | metadata)
    with pytest.raises(WeightsError) as info:
        load(tmp_path / "file")
    assert reason in str(info.value)
