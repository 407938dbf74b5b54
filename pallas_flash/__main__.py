"""The command line: `python -m pallas_flash doctor`."""

import sys
from collections.abc import Sequence

from pallas_flash import doctor, terminal


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; its exit code."""
    parser = terminal.Parser(prog="python -m pallas_flash", allow_abbrev=False)
    parser.add_argument(
        "command",
        choices=["doctor"],
        help="say what this machine has, and whether each implementation is right on it",
    )
    parser.add_argument("--json", action="store_true", help="say it as one JSON object")
    as_json = parser.parse_args(arguments).json
    with terminal.printing(parser.prog):
        return doctor.run(as_json)


if __name__ == "__main__":
    sys.exit(main())
