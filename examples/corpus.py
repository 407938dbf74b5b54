"""A text that a model learns byte by byte, and batches of it."""

from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Self

import numpy as np

# Of bytes.
VOCABULARY_SIZE = 256


class CorpusError(ValueError):
    """There is no such text, or too little of it."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text.

    Attributes:
      name: for the reader.
      data: uint8 [size].
    """

    name: str
    data: np.ndarray

    @classmethod
    def of_python(cls) -> Self:
        """What Python's `help()` says of the language itself.

        Half a megabyte of prose and examples that comes with the standard library of every CPython
        (`pydoc_data.topics`). Its words change a little with Python's version.
        """
        text = "\n\n".join(topics[name] for name in sorted(topics))
        return cls("the topics of Python's help()", np.frombuffer(text.encode(), np.uint8))

    @classmethod
    def read(cls, path: Path) -> Self:
        """A file as it is, whatever it holds."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CorpusError(f"cannot read {path}: {error.strerror}") from None
        return cls(str(path), np.frombuffer(data, np.uint8))

    @property
    def entropy(self) -> float:
        """Nats a byte: the loss of who knows how often each byte comes, and nothing else."""
        counts = np.bincount(self.data, minlength=VOCABULARY_SIZE)
        shares = counts[counts > 0] / self.data.size
        return float(-np.sum(shares * np.log(shares)))

    def batch(self, size: int, length: int, seed: int, step: int) -> np.ndarray:
        """Stretches from random places, int32 [size, length + 1]: each byte and the one after it.

        `seed` and `step` decide the places, so that the order of a training is the same each time.
        """
        self.require(length)
        rng = np.random.default_rng((seed, step))
        starts = rng.integers(0, self.data.size - length, size)
        return self.data[starts[:, None] + np.arange(length + 1)].astype(np.int32)

    def require(self, length: int) -> None:
        """CorpusError unless there are `length` bytes and one that follows them."""
        if self.data.size <= length:
            raise CorpusError(
                f"a length of {length} needs a text of more bytes, got {self.data.size} "
                f"from {self.name}"
            )
