"""A backend that cannot be used is RL0326, which says why and what its user can do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rldsl.diag import Diagnostic, Failure
from rldsl.plan import backends
from rldsl.plan.backends import described, how_to_install, unusable

DESCRIPTION = """
from rldsl.plan.backends import Description
DESCRIPTION = Description(calls=("infer",), divisions=("dp",))
"""


@pytest.fixture
def declared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the package of a backend `theirs`, which does not exist yet."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(backends, "_entry_points", lambda: {"theirs": {f"pkg_{tmp_path.name}.inner"}})
    backends.described.cache_clear()
    yield tmp_path / f"pkg_{tmp_path.name}/inner"
    backends.described.cache_clear()


def made(package: Path, description: str | None) -> None:
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("")
    if description is not None:
        (package / "describe.py").write_text(description)


def refused() -> Diagnostic:
    with pytest.raises(Failure) as caught:
        described("theirs")
    (found,) = caught.value.diagnostics
    assert found.code == "RL0326" and found.help.endswith(", or place the calls with `backend=torch`")
    return found


def test_a_package_that_can_be_used(declared: Path) -> None:
    made(declared, DESCRIPTION)
    assert described("theirs") is not None and described("nobody's") is None


@pytest.mark.parametrize("exists", [False, True])
def test_a_package_that_is_gone(declared: Path, exists: bool) -> None:
    """Whole, or the part of it that is the backend."""
    if exists:
        declared.parent.mkdir()
        (declared.parent / "__init__.py").write_text("")
    found = refused()
    assert "cannot be imported" in found.notes[0] and found.help.startswith("install pkg_") and "uninstall" in found.help


@pytest.mark.parametrize("description, note, advice", [
    (None, "no module `describe`", "report this to the authors"),
    ("x = 1\n", "exports no `DESCRIPTION`", "report this to the authors"),
    ("import none_such.part\n", "No module named 'none_such'", "install what is missing"),
    ("def (:\n", "SyntaxError", "report this to the authors"),
    ("from json import none_such\n", "ImportError: cannot import name 'none_such'", "report this to the authors"),
    ("raise RuntimeError('no luck')\n", "RuntimeError: no luck", "report this to the authors")])
def test_a_description_that_cannot_be_read(declared: Path, description: str | None, note: str, advice: str) -> None:
    made(declared, description)
    found = refused()
    assert note in found.notes[0] and advice in found.help


def test_several_packages(declared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_entry_points", lambda: {"theirs": {"one", "other"}})
    found = refused()
    assert "one, other" in found.notes[0] and found.help.startswith("uninstall all of them but one")


def test_the_torch_backend_is_no_way_out_of_itself() -> None:
    (found,) = unusable("torch", "why").diagnostics
    assert "backend=torch" not in found.help


def test_a_python_that_is_named_stands_in_the_way_of_an_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    known = described("vllm")
    assert known is not None
    monkeypatch.delenv("RLDSL_VLLM_PYTHON", raising=False)
    assert "unset" not in how_to_install(known)
    monkeypatch.setenv("RLDSL_VLLM_PYTHON", "/no/python")
    assert "`unset RLDSL_VLLM_PYTHON`" in how_to_install(known) and "instead of /no/python" in how_to_install(known)
