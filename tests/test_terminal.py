"""What commands share: output that nobody takes ends in a sentence, without a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BENCH = ["bench/run.py", "--suite", "smoke", "--rounds", "1", "--peers", "three-steps"]


@pytest.mark.parametrize(
    ("redirection", "message"),
    [(">&-", "standard output is closed"), (">/dev/full", "No space left on device")],
)
@pytest.mark.parametrize(
    ("command", "platforms", "program"),
    [
        # Where there is no device, the doctor has little to say and says it soon.
        (["-m", "pallas_flash", "doctor"], "nonsense", "python -m pallas_flash"),
        (BENCH, "cpu", "run.py"),
    ],
    ids=["doctor", "bench"],
)
def test_output_that_nobody_takes(command, platforms, program, redirection, message):
    done = subprocess.run(
        ["bash", "-c", f'"$0" "$@" {redirection}', sys.executable, *command],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": platforms},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr == f"{program}: cannot write: {message}\n"
