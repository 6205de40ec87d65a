"""The extension as `make vsix` packs it: what package.json names is there, and the packed extension loads."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXTENSION = ROOT / "grammar/editors/vscode"


@pytest.fixture(scope="module")
def package() -> dict[str, Any]:
    return json.loads((EXTENSION / "package.json").read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The .vsix, by the commands of the Makefile, in a copy. Skips where npm or the registry is missing."""
    if shutil.which("npm") is None:
        pytest.skip("no npm on this machine")
    root = tmp_path_factory.mktemp("extension")
    shutil.copytree(EXTENSION, root / "grammar/editors/vscode", ignore=shutil.ignore_patterns("node_modules"))
    shutil.copy(ROOT / "LICENSE", root)
    (root / "grammar/editors/vscode/secret.env").write_text("x")
    recipe = re.search(r"^VSCE := .*\nvsix:\n(?:\t.*\n)+", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    (root / "Makefile").write_text(recipe[0])
    done = subprocess.run(["make", "vsix"], cwd=root, capture_output=True, text=True, timeout=240)
    if done.returncode and re.search(r"ENOTFOUND|ECONNREFUSED|ETIMEDOUT|EAI_AGAIN|E40\d|ECONNRESET", done.stderr):
        pytest.skip("npm reaches no registry here")
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[Path] = list((root / "dist").iterdir())
    assert len(found) == 1
    return found[0]


def test_what_the_extension_names_exists_and_is_packed(package: dict[str, Any]) -> None:
    named = [package["main"], *(x["path"] for x in package["contributes"]["grammars"]),
             *(x["configuration"] for x in package["contributes"]["languages"])]
    for name in named:
        path = Path(name)
        assert (EXTENSION / path).is_file(), name
        assert {str(path), *map(str, path.parents)} & {*package["files"]}, f"{name} is not in `files`"
    for name in package["files"]:
        copied = name == "LICENSE"  # by the Makefile
        assert "*" in name or copied or (EXTENSION / name).exists(), name


@pytest.mark.thorough
def test_what_is_packed(package: dict[str, Any], packed: Path) -> None:
    assert packed.name == f"rlf-{package['version']}.vsix"  # as docs/editors.md installs it
    with zipfile.ZipFile(packed) as file:
        assert file.testzip() is None
        names = file.namelist()
    assert "extension/LICENSE.txt" in names and "extension/client/server.js" in names
    locked = json.loads((EXTENSION / "package-lock.json").read_text())["packages"]
    for library in filter(None, locked):
        assert f"extension/{library}/package.json" in names, library
        assert any(n.startswith(f"extension/{library}/") and "license" in n.lower() for n in names), library
    assert not [n for n in names if n.endswith((".ts", ".env", ".map", ".gitignore", "package-lock.json"))]


def test_the_packed_extension_loads(packed: Path, tmp_path: Path) -> None:
    """With the library of the lock file: every module of the client is there, and its library."""
    with zipfile.ZipFile(packed) as file:
        file.extractall(tmp_path / "out")
    script = """
      const Module = require("module"), load = Module._load;
      const vscode = new Proxy(class {}, { get: (_, name) => (name === "prototype" ? {} : class {}) });
      Module._load = function (name, ...rest) { return name === "vscode" ? vscode : load.call(this, name, ...rest); };
      process.chdir(process.argv[1]);
      const { activate, deactivate } = require(process.argv[1] + "/extension.js");
      const { LanguageClient } = Module.createRequire(process.argv[1] + "/extension.js")("vscode-languageclient/node");
      console.log([activate, deactivate, LanguageClient].map((x) => typeof x).join());
    """
    done = subprocess.run(["node", "-e", script, str(tmp_path / "out/extension")], capture_output=True, text=True,
                          timeout=60)
    assert done.stdout.strip() == "function,function,function", done.stderr
