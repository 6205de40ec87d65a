"""What pyproject.toml says of packages is what there is: an editable install hides a package that a wheel would
lack."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


TOOL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
PLACES = TOOL["package-dir"]
FOLDERS = {".ci", "backends", "benchmarks", "docs", "examples", "grammar", "rldsl", "stdlib", "tests"}  # of the root


def folder(package: str) -> Path:
    """Where a package is, below the root."""
    top = max((p for p in PLACES if package == p or package.startswith(p + ".")), key=len)
    return Path(PLACES[top], *package[len(top):].strip(".").split(".")) if package != top else Path(PLACES[top])


def files() -> list[Path]:
    """Of all packages, below the root; the extensions of editors are not among them."""
    found = [f.relative_to(ROOT) for top in set(PLACES.values()) for f in (ROOT / top).rglob("*") if f.is_file()]
    return [f for f in found if not any(p in ("editors", "__pycache__") or p.startswith(".") for p in f.parts)]


def test_every_package_is_in_a_wheel() -> None:
    named = {folder(p) for p in TOOL["packages"]}
    there = {f.parent for f in files() if f.suffix == ".py"}
    assert there <= named, f"not in pyproject.toml: {sorted(map(str, there - named))}"
    assert all((ROOT / f).is_dir() for f in named)


def test_every_file_that_packages_read_is_in_a_wheel() -> None:
    patterns = [folder(package) / pattern for package, some in TOOL["package-data"].items() for pattern in some]
    data = {pattern: {f.relative_to(ROOT) for f in ROOT.glob(str(pattern))} for pattern in patterns}
    assert all(data.values()), f"no such file: {[str(p) for p, found in data.items() if not found]}"
    lacking = {f for f in files() if f.suffix != ".py"}.difference(*data.values())
    assert not lacking, f"package-data in pyproject.toml lacks {sorted(map(str, lacking))}"


def test_nothing_else_lies_at_the_root() -> None:
    """A test or a script that writes into its current directory must not be committed with what it wrote."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert {file.partition("/")[0] for file in listed.splitlines() if "/" in file} == FOLDERS
