"""The doctor: what it says of a machine in order and out of order, and how its command ends."""

import dataclasses
import importlib.metadata
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from pallas_flash import IMPLEMENTATIONS, backends, doctor
from pallas_flash.__main__ import main
from pallas_flash.backends.xla import XlaBackend
from pallas_flash.spec import DecodeOperands
from pallas_flash.testing import Case, Inputs, make_inputs

ROOT = Path(__file__).parent.parent
SMALL = {
    "causal": Case(B=1, T=9, S=9, H=8, is_causal=True),
    "bias": Case(B=1, T=9, S=9, H=8, bias="NTS"),
}


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pallas_flash", *arguments],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
    )


@pytest.fixture
def small(monkeypatch):
    """Two small checks, of plain XLA alone."""
    monkeypatch.setattr(doctor, "CHECKS", SMALL)
    monkeypatch.setattr(backends, "IMPLEMENTATIONS", ("xla",))


@pytest.fixture
def decoding(monkeypatch):
    """The two checks that decode, of plain XLA alone."""
    monkeypatch.setattr(doctor, "CHECKS", {name: doctor.CHECKS[name] for name in doctor.DECODING})
    monkeypatch.setattr(backends, "IMPLEMENTATIONS", ("xla",))


def verdicts(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    """The exit code and the verdicts of the command, with --json."""
    code = main(["doctor", "--json", *arguments])
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] == (code == 0)
    return code, [check["verdict"] for check in report["checks"]]


def test_all_is_right_on_a_cpu():
    done = command("doctor", "--json", JAX_ENABLE_X64="1", JAX_NUMPY_DTYPE_PROMOTION="strict")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    report = json.loads(done.stdout)
    assert report["ok"]
    assert not report["problem"]
    assert report["environment"]["jax"] == jax.__version__
    assert report["environment"]["device"] == "cpu"
    can_run = {name: not reasons for name, reasons in report["implementations"].items()}
    assert can_run == {"triton": False, "interpret": True, "xla": True}
    tried = [(check["implementation"], check["check"]) for check in report["checks"]]
    assert tried == [(name, check) for name in ("interpret", "xla") for check in doctor.CHECKS]
    assert {"decoding", "decoding in pages"} == doctor.DECODING.keys() < doctor.CHECKS.keys()
    for check in report["checks"]:
        if check["implementation"] == "interpret" and check["check"] == "bias and mask":
            assert check["verdict"].startswith("cannot: the kernels do not read a bias")
            continue
        assert check["verdict"] == "right"
        assert all(check["errors"][name] <= x for name, x in check["budgets"].items())
        assert check["forward_ms"] > 0
        if check["check"] in doctor.DECODING:
            assert check["errors"].keys() == check["budgets"].keys() == {"out", "lse"}
            assert check["both_ms"] is None
        else:
            assert check["errors"].keys() == check["budgets"].keys() >= {"out", "lse", "dquery"}
            assert check["both_ms"] > 0


def test_without_devices_nothing_can_be_checked():
    for arguments in (["doctor"], ["doctor", "--json"]):
        done = command(*arguments, JAX_PLATFORMS="nonsense")
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert "nonsense" in done.stdout
    report = json.loads(done.stdout)
    assert report["problem"] == report["environment"]["device"]
    assert report["checks"] == []


def test_devices_that_cannot_be_listed(monkeypatch, capsys):
    def fail(*_):
        raise OSError("the driver\nis out of order\u2026")

    monkeypatch.setattr(jax, "devices", fail)
    found = doctor.environment()
    assert found["device"] == "OSError: the driver is out of order\\u2026"
    assert found["compute capability"] == "unknown"
    assert main(["doctor"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"Nothing can be checked: {found['device']}"


def test_a_reference_without_its_cpu(monkeypatch, capsys):
    devices = jax.devices

    def gpu_alone(platform: str | None = None):
        if platform == "cpu":
            raise RuntimeError("Unknown backend cpu")
        return devices(platform)

    monkeypatch.setattr(jax, "devices", gpu_alone)
    assert main(["doctor"]) == 1
    assert "JAX_PLATFORMS=cuda,cpu" in capsys.readouterr().out.splitlines()[-1]


def test_the_environment_is_plain_text(monkeypatch):
    version = importlib.metadata.version

    def without_flax(package: str) -> str:
        if package == "flax":
            raise importlib.metadata.PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr(importlib.metadata, "version", without_flax)
    monkeypatch.setenv("PATH", "")
    found = doctor.environment()
    assert all(type(x) is str and x for pair in found.items() for x in pair)
    assert found["flax"] == "not installed"
    assert found["driver"] == "unknown"
    assert found["numpy"] == np.__version__
    assert list(found) == [name.lower() for name in found]


@pytest.mark.parametrize(
    ("says", "driver"),
    [("echo 580.1; echo 580.1", "580.1"), ("exit 9", "unknown"), ("", "unknown")],
)
def test_the_driver_is_what_nvidia_smi_says(monkeypatch, tmp_path, says, driver):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{says}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.environment()["driver"] == driver


def test_no_triton_lowering_is_a_reason(small, monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    lowering = "jax.experimental.pallas.triton"
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == lowering else find_spec(name)
    )
    monkeypatch.setattr(backends, "IMPLEMENTATIONS", IMPLEMENTATIONS)
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    reason = f"JAX {jax.__version__} has no Triton lowering of Pallas"
    assert report["implementations"]["interpret"] == [reason]
    assert report["implementations"]["triton"][0] == reason
    if jax.default_backend() != "gpu":
        assert "compute capability 8.0" in report["implementations"]["triton"][1]
    assert {check["implementation"] for check in report["checks"]} == {"xla"}


def test_wrong_outputs(small, monkeypatch, capsys):
    forward = XlaBackend.forward

    def off(*args, **options):
        result = forward(*args, **options)
        return result._replace(out=1.05 * result.out)

    monkeypatch.setattr(XlaBackend, "forward", off)
    code, found = verdicts(capsys)
    assert code == 1
    assert all(verdict.startswith("WRONG: out: error 0.05, budget ") for verdict in found)


def test_a_wrong_gradient(small, monkeypatch, capsys):
    backward = XlaBackend.backward

    def off(*args):
        gradients = backward(*args)
        return gradients._replace(key=1.05 * gradients.key)

    monkeypatch.setattr(XlaBackend, "backward", off)
    code, found = verdicts(capsys)
    assert code == 1
    assert all(verdict.startswith("WRONG: dkey: error 0.05, budget ") for verdict in found)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "dkey 5.0e-02" in text
    assert text.splitlines()[-1] == "2 of 2 checks went wrong."


def test_wrong_decoding(decoding, monkeypatch, capsys):
    decode = XlaBackend.decode

    def off(*args, **options):
        result = decode(*args, **options)
        return result._replace(out=1.05 * result.out)

    monkeypatch.setattr(XlaBackend, "decode", off)
    code, found = verdicts(capsys)
    assert code == 1
    assert len(found) == 2
    assert all(verdict.startswith("WRONG: out: error ") for verdict in found)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "2 of 2 checks went wrong."


def test_pages_in_a_wrong_order(decoding, monkeypatch, capsys):
    decode = XlaBackend.decode

    def in_order(self, spec, operands: DecodeOperands, **options):
        table = operands.page_table
        if table is not None:
            table = np.arange(table.size, dtype=np.int32).reshape(table.shape)
        return decode(self, spec, operands._replace(page_table=table), **options)

    monkeypatch.setattr(XlaBackend, "decode", in_order)
    code, (contiguous, in_pages) = verdicts(capsys)
    assert code == 1
    assert contiguous == "right"
    assert in_pages.startswith("WRONG: out: error ")


def test_decoding_has_reasons_of_its_own(decoding, monkeypatch, capsys):
    def unpaged(self, spec, operands, device):
        assert spec.is_causal == isinstance(operands, DecodeOperands)
        return ("no pages",) if getattr(operands, "page_table", None) is not None else ()

    monkeypatch.setattr(XlaBackend, "unsupported_reasons", unpaged)
    assert verdicts(capsys) == (0, ["right", "cannot: no pages"])


def test_decoding_has_no_gradients(decoding, capsys):
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    heading = next(line for line in lines if line.startswith("implementation"))
    rows = lines[lines.index(heading) + 1 :][:2]
    for row, name in zip(rows, doctor.DECODING, strict=True):
        cells = row.removeprefix("xla").lstrip().removeprefix(name).split()
        error, share, milliseconds, verdict = cells
        assert all(float(cell) > 0 for cell in (error, share, milliseconds))
        # Each under its heading's end, and nothing under those of gradients.
        for title, cell in (("out", error), ("of budget", share), (" ms", milliseconds)):
            end = heading.index(title) + len(title)
            assert row[:end].endswith(cell)
        assert row[heading.index("verdict") :] == verdict == "right"


def test_an_output_that_is_no_number(small, monkeypatch, capsys):
    forward = XlaBackend.forward

    def nan(*args, **options):
        result = forward(*args, **options)
        return result._replace(out=np.float32(np.nan) * result.out)

    monkeypatch.setattr(XlaBackend, "forward", nan)
    assert main(["doctor", "--json"]) == 1
    text = capsys.readouterr().out
    assert "NaN" not in text
    assert "Infinity" not in text
    assert json.loads(text)["checks"][0]["errors"]["out"] == "inf"
    assert main(["doctor"]) == 1


def test_an_implementation_that_raises(small, monkeypatch, capsys):
    def fail(*_, **__):
        raise MemoryError("no room\nfor " + 1000 * "x")

    monkeypatch.setattr(XlaBackend, "forward", fail)
    code, found = verdicts(capsys)
    assert code == 1
    assert all(verdict.startswith("FAILED: MemoryError: no room for xx") for verdict in found)
    assert all(verdict.endswith("x...") and len(verdict) < 400 for verdict in found)
    assert main(["doctor"]) == 1
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    assert captured.out.count("FAILED") == len(SMALL)


def test_an_implementation_that_cannot_be_asked(small, monkeypatch, capsys):
    def fail(name: str):
        raise ImportError(f"{name} is broken")

    monkeypatch.setattr(backends, "load", fail)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "xla                 cannot run: ImportError: xla is broken" in text
    assert "FAILED: ImportError: xla is broken" in text


def test_where_nothing_can_run(small, monkeypatch, capsys):
    monkeypatch.setattr(XlaBackend, "unsupported_reasons", lambda *_: ("no", "never"))
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if line.startswith("xla")] == [
        "xla                 cannot run: no",
        "xla                 cannot run: never",
    ]
    assert text.splitlines()[-1] == "Nothing can run here."


def test_one_bad_check_does_not_hide_the_others(small, monkeypatch, capsys):
    def unlucky(case: Case, seed: int) -> Inputs:
        if case.bias is not None:
            raise ValueError("no bias today")
        return make_inputs(case, seed)

    monkeypatch.setattr(doctor, "make_inputs", unlucky)
    assert verdicts(capsys) == (1, ["right", "FAILED: ValueError: no bias today"])


def test_text_and_json_agree(small, capsys):
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    for name, value in report["environment"].items():
        assert f"{name:<20}{value}" in lines
    heading = next(line for line in lines if line.startswith("implementation"))
    rows = lines[lines.index(heading) + 1 :][: len(SMALL)]
    for row, check in zip(rows, report["checks"], strict=True):
        assert row.startswith(check["implementation"])
        assert check["check"] in row
        assert f"{check['errors']['out']:.1e}" in row
        assert row[heading.index("verdict") :] == check["verdict"]


@pytest.mark.parametrize(
    "arguments", [[], ["nurse"], ["doctor", "--jso"], ["doctor", "now"], ["--json"]], ids=str
)
def test_a_bad_command_line_is_answered_in_a_sentence(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("python -m pallas_flash: ")
    assert captured.err.count("\n") == 1


def test_a_number_that_json_has_no_form_for_is_a_string():
    outcome = doctor.Outcome(
        "xla", "causal", "WRONG", {"out": math.inf, "lse": math.nan, "dkey": 0.1}
    )
    report = doctor.Report({}, checks=(outcome,))
    (check,) = json.loads(report.to_json())["checks"]
    assert check["errors"] == {"out": "inf", "lse": "nan", "dkey": 0.1}
    assert not dataclasses.replace(report, checks=()).ok


def test_text_that_a_terminal_may_not_take(monkeypatch):
    monkeypatch.setattr(doctor, "_driver", lambda: "535\u00b11")
    assert doctor.environment()["driver"] == "535\\xb11"


def test_reasons_that_are_none(small, monkeypatch, capsys):
    """A backend that breaks its promise is one that fails."""
    monkeypatch.setattr(XlaBackend, "unsupported_reasons", lambda *_: None)
    code, found = verdicts(capsys)
    assert code == 1
    assert found[0].startswith("FAILED: TypeError")


def test_an_error_without_words_is_told_by_its_place(monkeypatch):
    def fail(*_):
        raise AssertionError

    monkeypatch.setattr(jax, "devices", fail)
    assert doctor.environment()["device"].startswith("AssertionError: in fail, line ")
