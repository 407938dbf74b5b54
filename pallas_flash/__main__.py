"""The command line: `python -m pallas_flash doctor`."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from pallas_flash import doctor


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and not how everything is used."""
        self.exit(2, f"{self.prog}: {message} (--help says what there is)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; its exit code."""
    parser = _Parser(prog="python -m pallas_flash", allow_abbrev=False)
    parser.add_argument(
        "command",
        choices=["doctor"],
        help="say what this machine has, and whether each implementation is right on it",
    )
    parser.add_argument("--json", action="store_true", help="say it as one JSON object")
    as_json = parser.parse_args(arguments).json
    try:
        code = doctor.run(as_json)
        sys.stdout.flush()
    # Nobody reads on, or there is no room.
    except OSError as problem:
        # Python writes what is left once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"{parser.prog}: cannot write: {problem.strerror}", file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
