"""Where a run is made, and of what."""

import datetime
import subprocess
from pathlib import Path

import jax

from pallas_flash import doctor

_ROOT = Path(__file__).parent.parent


def describe() -> dict[str, str]:
    """The card, versions, the commit and the day."""
    return {
        "card": jax.devices()[0].device_kind,
        **doctor.environment(),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def git(*arguments: str) -> bytes:
    """What git says of this checkout; an error where there is no git, or it has one."""
    return subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, check=True).stdout


def _commit() -> str:
    """Of this checkout; "-dirty" where files differ from it."""
    try:
        return git("describe", "--always", "--dirty", "--abbrev=12").decode().strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "unknown"
