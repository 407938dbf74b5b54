"""What commands share: refusals in one sentence, and output that nobody takes."""

import argparse
import contextlib
import os
import sys
from collections.abc import Generator
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """One that refuses in a sentence."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and not how everything is used."""
        self.exit(2, f"{self.prog}: {message} (--help says what there is)\n")


def refusal(error: NotImplementedError) -> str:
    """In one line what the library says in several: the call, and each reason not to run it."""
    call, *reasons = str(error).splitlines()
    return f"{'; '.join(reason.strip() for reason in reasons)} ({call.rstrip(':')})"


@contextlib.contextmanager
def printing(program: str) -> Generator[None]:
    """End in a sentence, with code 1, where what is printed inside finds no reader or no room."""
    # So Python starts where it is closed, and then prints nothing.
    if sys.stdout is None:
        sys.exit(f"{program}: cannot write: standard output is closed")
    try:
        yield
        sys.stdout.flush()
    except OSError as problem:
        # One that names a file is not of the output.
        if problem.filename is not None:
            raise
        # Python writes what is left once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(f"{program}: cannot write: {problem.strerror}")
