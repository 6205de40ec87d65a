"""What pyproject.toml says of packages is what there is: an editable install hides a package that a wheel would
lack."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_package_is_in_a_wheel() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    places = tool["package-dir"]

    def folder(package: str) -> Path:
        top = max((p for p in places if package == p or package.startswith(p + ".")), key=len)
        return Path(places[top], *package[len(top):].strip(".").split(".")) if package != top else Path(places[top])

    named = {folder(p) for p in tool["packages"]}
    there = {f.parent.relative_to(ROOT) for top in set(places.values()) for f in (ROOT / top).rglob("*.py")
             if "editors" not in f.parts}
    assert there <= named, f"not in pyproject.toml: {sorted(map(str, there - named))}"
    assert all((ROOT / f).is_dir() for f in named)
