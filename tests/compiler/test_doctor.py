"""`rlc doctor`: versions as they are, and what cannot be used with its reason."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner

from rldsl.cli import main
from rldsl.commands import doctor


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is started instead of an interpreter that imports torch: a script that the test writes."""
    script = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setenv("RLDSL_CACHE", "off")
    return script


def answer(python: Path, body: str) -> None:
    python.write_text(f"#!/bin/sh\n{body}\n")
    python.chmod(0o755)


HEALTHY = {"cuda": "", "threads": 1, "instructions": "AVX2", "collectives": ["gloo"], "devices": []}


def test_versions_are_those_installed(python: Path) -> None:
    answer(python, f"echo '{json.dumps(HEALTHY)}'")
    done = CliRunner().invoke(main, ["doctor", "--json"])
    found = json.loads(done.output)
    assert done.exit_code == 0 and not found["problems"]
    packages = {p["name"]: p["version"] for p in found["packages"]}
    assert packages["torch"] == version("torch") and packages["lark"] == version("lark")
    assert found["backends"]["torch"] == "" and "flash" not in found["missing_extras"]


def test_devices_are_listed(python: Path) -> None:
    answer(python, f"echo '{json.dumps(HEALTHY | {'devices': ['H100, 80 GiB'], 'collectives': ['gloo', 'nccl']})}'")
    text = CliRunner().invoke(main, ["doctor"]).output
    assert "H100, 80 GiB" in text and "gloo, nccl" in text
    assert "rldsl[flash" in text  # it could be used here, and is not installed


@pytest.mark.parametrize(("body", "reason"), [
    ("echo 'ImportError: libcudart.so.12: no such file' >&2; exit 1", "libcudart"),
    ("kill -9 $$", "exit status -9"),
])
def test_a_torch_that_fails_is_a_problem(python: Path, body: str, reason: str) -> None:
    answer(python, body)
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 1 and reason in done.output and "problem: torch" in done.output


def test_a_torch_that_hangs_is_a_problem(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(python, "exec sleep 60")
    monkeypatch.setattr(doctor, "SECONDS", 0.2)
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 1 and "no answer" in done.output


def test_a_missing_package_is_named_with_its_extra(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(python, f"echo '{json.dumps(HEALTHY)}'")
    monkeypatch.setattr(doctor, "_version", lambda name: "" if name in ("wandb", "lark") else "1")
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 1  # lark is needed by every command
    assert "problem: lark is not installed" in done.output and "pip install 'rldsl[wandb]'" in done.output


@pytest.mark.parametrize(("cache", "compiler", "says"), [
    ("off", "/usr/bin/cc", "none, torch's operators run: needs a cache"),
    ("there", "/usr/bin/cc", "compiled with /usr/bin/cc"),
    ("there", None, "none, torch's operators run: needs `cc`"),
])
def test_kernels(python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str, compiler: str | None,
                 says: str) -> None:
    monkeypatch.setenv("RLDSL_CACHE", cache if cache == "off" else str(tmp_path / cache))
    monkeypatch.setattr(doctor.shutil, "which", lambda _: compiler)
    answer(python, f"echo '{json.dumps(HEALTHY)}'")
    assert says in CliRunner().invoke(main, ["doctor"]).output
