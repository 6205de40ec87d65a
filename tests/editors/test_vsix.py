"""Packing the extension: what is in the .vsix, and what keeps a folder from being packed."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import zipfile
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree as xml

import pytest

EDITORS = Path(__file__).parents[2] / "grammar" / "editors"
NS = {"v": "http://schemas.microsoft.com/developer/vsx-schema/2011"}
TYPES = "{http://schemas.openxmlformats.org/package/2006/content-types}"


@pytest.fixture(scope="module")
def vsix() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vsix", EDITORS / "vsix.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The extension, with libraries that are only names."""
    made = tmp_path / "vscode"
    shutil.copytree(EDITORS / "vscode", made, ignore=shutil.ignore_patterns("node_modules"))
    lock = json.loads((made / "package-lock.json").read_text())
    for name, package in lock["packages"].items():
        if name:
            (made / name).mkdir(parents=True)
            (made / name / "package.json").write_text(json.dumps({"version": package["version"]}))
            (made / name / "License.txt").write_text("free")
            (made / name / "main.d.ts").write_text("export {}")
    return made


def test_what_is_packed(vsix: ModuleType, folder: Path, tmp_path: Path) -> None:
    (folder / "secret.env").write_text("x")
    names = vsix.pack(folder, tmp_path / "out" / "a.vsix")
    with zipfile.ZipFile(tmp_path / "out" / "a.vsix") as file:
        assert file.testzip() is None and tuple(file.namelist()) == names
        manifest = xml.fromstring(file.read("extension.vsixmanifest"))
        types = xml.fromstring(file.read("[Content_Types].xml"))
        package = json.loads(file.read("extension/package.json"))
    identity = manifest.find(".//v:Identity", NS)
    assert identity is not None and identity.attrib == {
        "Language": "en-US", "Id": package["name"], "Version": package["version"], "Publisher": package["publisher"]}
    engine = manifest.find(".//v:Property[@Id='Microsoft.VisualStudio.Code.Engine']", NS)
    assert engine is not None and engine.get("Value") == package["engines"]["vscode"]
    assert {a.get("Path") for a in manifest.iterfind(".//v:Asset", NS)} <= set(names)
    own = {n.removeprefix("extension/") for n in names if n.startswith("extension/")}
    paths = [package["main"], *(x["path"] for x in package["contributes"]["grammars"]),
             *(x["configuration"] for x in package["contributes"]["languages"])]
    assert {p.removeprefix("./") for p in paths} <= own
    assert "node_modules/vscode-languageclient/License.txt" in own
    assert not [n for n in own if n.endswith((".ts", ".env", ".gitignore", "package-lock.json"))]
    known = {e.get("Extension") for e in types.iter(f"{TYPES}Default")}
    assert {Path(n).suffix for n in names if Path(n).suffix} - {".xml"} <= known


def test_the_same_files_make_the_same_bytes(vsix: ModuleType, folder: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        vsix.pack(folder, tmp_path / name)
        (folder / "extension.js").touch()
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_libraries_of_development_stay_out(vsix: ModuleType, folder: Path, tmp_path: Path) -> None:
    lock = json.loads((folder / "package-lock.json").read_text())
    lock["packages"]["node_modules/tool"] = {"version": "1.0.0", "dev": True}
    (folder / "package-lock.json").write_text(json.dumps(lock))
    assert not [n for n in vsix.pack(folder, tmp_path / "a") if "tool" in n]


@pytest.mark.parametrize("damage, why", [
    (lambda f: shutil.rmtree(f / "node_modules"), "not installed"),
    (lambda f: (f / "node_modules/semver/package.json").write_text('{"version": "0.0.1"}'), "semver is 0.0.1"),
    (lambda f: (f / "extension.js").unlink(), "extension.js, which is not there"),
    (lambda f: shutil.rmtree(f / "syntaxes"), "syntaxes, which is not there"),
])
def test_what_cannot_be_packed(vsix: ModuleType, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                               damage: object, why: str) -> None:
    damage(folder)  # type: ignore[operator]
    assert vsix.main(str(folder), str(tmp_path / "out")) == 1
    assert why in capsys.readouterr().err and not list(tmp_path.glob("out/*"))


@pytest.mark.skipif(shutil.which("npm") is None, reason="no npm on this machine")
def test_the_packed_extension_loads(vsix: ModuleType, tmp_path: Path) -> None:
    """With the library of the lock file, from the registry: every module of the client is there, and its library."""
    made = tmp_path / "vscode"
    shutil.copytree(EDITORS / "vscode", made, ignore=shutil.ignore_patterns("node_modules"))
    installed = subprocess.run(["npm", "ci", "--omit=dev", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=made,
                               capture_output=True, text=True, timeout=120)
    if installed.returncode:
        pytest.skip("npm cannot install here")
    vsix.pack(made, tmp_path / "a.vsix")
    with zipfile.ZipFile(tmp_path / "a.vsix") as file:
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
