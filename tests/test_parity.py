"""The example decoder gives the logits and tokens of transformers' Llama and Qwen3.

Tiny models with random weights, which transformers saves and the example loads.
"""

from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder import Decoder
from gguf_file import GGUFFile
from loading import load_decoder
from tokenizers import pre_tokenizers

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# Threads would wait for one another, over models as tiny as these.
torch.set_num_threads(1)

VOCABULARY = 101
LENGTH = 40
NEW_TOKENS = 10
# float32 beside float32, of logits that spread by about 1: five times what was seen of it.
TOLERANCE = 1e-4

LLAMA = (transformers.LlamaConfig, transformers.LlamaForCausalLM)
QWEN3 = (transformers.Qwen3Config, transformers.Qwen3ForCausalLM)
# Of a length that was far shorter than the prompts here.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
CASES = {
    "llama": (LLAMA, {}),
    "llama-heads-of-their-own-size": (LLAMA, {"head_dim": 12, "num_key_value_heads": 1}),
    "llama-biases-and-tied-embeddings": (
        LLAMA,
        {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4},
    ),
    "llama-linear": (LLAMA, {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama-llama3": (LLAMA, {"rope_parameters": LLAMA3}),
    "llama-yarn": (
        LLAMA,
        {
            "rope_parameters": YARN
            | {"attention_factor": 1.5, "beta_fast": 0.7, "beta_slow": 0.05, "rope_theta": 100.0}
        },
    ),
    "qwen3": (QWEN3, {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-biases-and-yarn": (
        QWEN3,
        {"head_dim": 16, "attention_bias": True, "rope_parameters": YARN},
    ),
    "qwen3-window-in-some-layers": (
        QWEN3,
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3-window-in-all-layers": (
        QWEN3,
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    ),
}
# One of each kind of what positions decide: how heads turn, and what they see.
OF_EACH_KIND = ("llama-yarn", "qwen3-window-in-some-layers")


@pytest.fixture
def tokens(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(VOCABULARY, size=(3, LENGTH), dtype=np.int32)


@pytest.fixture(params=CASES)
def oracle(request: pytest.FixtureRequest, seed: int):
    return make_oracle(request.param, seed)


@pytest.fixture
def decoder(oracle, tmp_path: Path) -> Decoder:
    oracle.save_pretrained(tmp_path)
    return load_decoder(tmp_path)


def make_oracle(case: str, seed: int):
    """A model of transformers, no part of which is left at a value that changes nothing."""
    (make_config, make_model), options = CASES[case]
    config = make_config(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            # Logits, in attention and at the end, of order 1.
            "initializer_range": 0.2,
            "attn_implementation": "eager",
        }
        | options
    )
    torch.manual_seed(seed)
    model = make_model(config).eval()
    for name, parameter in model.named_parameters():
        # Norms begin as 1 and biases as 0.
        if parameter.ndim == 1:
            torch.nn.init.uniform_(parameter, -0.5, 0.5)
            parameter.data += 0.0 if name.endswith("bias") else 1.0
    return model


def logits_of(oracle, tokens: np.ndarray, **options) -> np.ndarray:
    """[B, T, V]; options are transformers', as arrays."""
    options = {name: torch.from_numpy(x).long() for name, x in options.items()}
    with torch.no_grad():
        return oracle(torch.from_numpy(tokens).long(), **options).logits.numpy()


def greedy(oracle, prompt: np.ndarray) -> tuple[list[int], np.ndarray]:
    """The most likely tokens after one prompt [T], by transformers' own loop and cache.

    With them the logits [new tokens, V] that they are the maxima of.
    """
    out = oracle.generate(
        torch.from_numpy(prompt)[None].long(),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits).numpy()


@jax.jit
def forward(decoder: Decoder, tokens: jax.Array, **options: jax.Array) -> jax.Array:
    return decoder.logits(decoder(tokens, **options))


@jax.jit
def prefill(decoder: Decoder, tokens: jax.Array, lengths: jax.Array):
    hidden, caches = decoder.prefill(tokens, lengths, capacity=LENGTH + NEW_TOKENS)
    return decoder.logits(hidden), caches


@jax.jit
def extend(decoder: Decoder, tokens: jax.Array, caches, counts: jax.Array | None = None):
    hidden, caches = decoder.extend(tokens, caches, counts)
    return decoder.logits(hidden), caches


def assert_equal(logits: jax.Array | np.ndarray, expected: np.ndarray) -> None:
    # So small a difference says nothing of logits that hardly differ.
    assert 0.5 < expected.std() < 5
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)


def test_a_forward_gives_the_logits(oracle, decoder: Decoder, tokens: np.ndarray) -> None:
    assert_equal(forward(decoder, jnp.asarray(tokens)), logits_of(oracle, tokens))


def test_generation_gives_the_logits_and_tokens(
    oracle, decoder: Decoder, tokens: np.ndarray
) -> None:
    lengths = [LENGTH, 1, 17]
    logits, caches = prefill(decoder, jnp.asarray(tokens), jnp.asarray(lengths, jnp.int32))
    expected = [greedy(oracle, row[:length]) for row, length in zip(tokens, lengths, strict=True)]
    for row, length in enumerate(lengths):
        assert_equal(logits[row, :length], logits_of(oracle, tokens[row : row + 1, :length])[0])
    logits = np.asarray(logits)[range(3), np.array(lengths) - 1]
    for step in range(NEW_TOKENS):
        new = np.array([row_tokens[step] for row_tokens, _ in expected], np.int32)
        of_step = np.stack([row_logits[step] for _, row_logits in expected])
        assert_equal(logits, of_step)
        second, first = np.sort(of_step)[:, -2:].T
        # Either may come first of two that are as good as equal.
        is_clear = first - second > 2 * TOLERANCE
        assert (logits.argmax(-1) == new)[is_clear].all()
        logits, caches = extend(decoder, jnp.asarray(new[:, None]), caches)
        logits = np.asarray(logits)[:, 0]


@pytest.mark.parametrize("oracle", ["llama", "qwen3", *OF_EACH_KIND], indirect=True)
def test_a_prompt_in_chunks_gives_the_logits(oracle, decoder: Decoder, tokens: np.ndarray) -> None:
    expected = logits_of(oracle, tokens)
    caches = decoder.empty_caches(len(tokens), LENGTH)
    ends = np.zeros(3, int)
    # So many of 20 tokens are a row's next ones, and padding follows.
    for counts in ([20, 1, 13], [0, 20, 13], [20, 19, 14]):
        chunk = np.stack([np.resize(row[end:], 20) for row, end in zip(tokens, ends, strict=True)])
        logits, caches = extend(decoder, jnp.asarray(chunk), caches, jnp.asarray(counts, jnp.int32))
        for row, count in enumerate(counts):
            start = ends[row]
            if count:
                assert_equal(logits[row, :count], expected[row, start : start + count])
        ends += counts
    assert caches.lengths.tolist() == [LENGTH] * 3


@pytest.mark.parametrize("oracle", OF_EACH_KIND, indirect=True)
def test_padding_on_the_right_changes_nothing(oracle, decoder: Decoder, tokens: np.ndarray) -> None:
    lengths = np.array([LENGTH, 7, 23], np.int32)
    is_token = np.arange(LENGTH) < lengths[:, None]
    expected = logits_of(oracle, tokens, attention_mask=is_token)
    logits = forward(decoder, jnp.asarray(tokens), lengths=jnp.asarray(lengths))
    assert_equal(np.asarray(logits)[is_token], expected[is_token])


@pytest.mark.parametrize("oracle", OF_EACH_KIND, indirect=True)
def test_padding_on_the_left_changes_nothing(oracle, decoder: Decoder, tokens: np.ndarray) -> None:
    padding = np.array([0, 7, 23])
    is_token = np.arange(LENGTH) >= padding[:, None]
    positions = np.maximum(np.arange(LENGTH) - padding[:, None], 0)
    expected = logits_of(oracle, tokens, attention_mask=is_token, position_ids=positions)
    logits = forward(
        decoder,
        jnp.asarray(tokens),
        segment_ids=jnp.asarray(is_token, jnp.int32),
        positions=jnp.asarray(positions, jnp.int32),
    )
    assert_equal(np.asarray(logits)[is_token], expected[is_token])


def test_bfloat16_in_several_files_gives_the_logits(
    seed: int, tmp_path: Path, tokens: np.ndarray
) -> None:
    make_oracle("llama", seed).bfloat16().save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    oracle = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    decoder = load_decoder(tmp_path)
    assert_equal(forward(decoder, jnp.asarray(tokens)), logits_of(oracle, tokens))


def test_a_gguf_file_splits_text_as_qwen_does(tmp_path: Path) -> None:
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [
        "1 2",
        "\u0120 t",
        "\u0120t h",
        "e r",
        "\u00c3 \u00a9",
        "\u0120 \u0120",
        "' l",
        "'l l",
    ]
    tokens += ["".join(merge.split()) for merge in merges]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*tokens, "<|im_end|>", "<think>"])
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens) + [3, 4])
    writer.add_token_merges(merges)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours = GGUFFile(tmp_path / "model.gguf").tokenizer()
    theirs = transformers.Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[tuple(merge.split()) for merge in merges],
    )
    text = (
        "In  the 1212 \u00e9t\u00e9s,\r\n\n   cafe\u0301 I'll WE'LL \u65e5\u672c+12! other \t x  "
    )
    ids = ours.encode(text).ids
    # Digits do not merge, and the others do.
    merged = {tokens[i] for i in ids if i >= 256}
    assert merged == {"\u0120th", "er", "\u00c3\u00a9", "\u0120\u0120", "'ll"}
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(ids) == text.replace("e\u0301", "\u00e9")
    ids = ours.encode("a<think>b<|im_end|>").ids
    assert ids[1::2] == [len(tokens) + 1, len(tokens)]
    assert ours.decode(ids) == "a<think>b"
