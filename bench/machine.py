"""Where a run is made, and of what."""

import datetime
import subprocess
from pathlib import Path

import jax

from pallas_flash import doctor


def describe() -> dict[str, str]:
    """The card, versions, the commit and the day."""
    return {
        "card": jax.devices()[0].device_kind,
        **doctor.environment(),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _commit() -> str:
    """Of this checkout; "-dirty" where files differ from it."""
    command = ("git", "describe", "--always", "--dirty", "--abbrev=12")
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
