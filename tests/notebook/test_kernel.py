"""One notebook, executed by a real kernel as Jupyter would: what its cells hold afterwards."""

from __future__ import annotations

from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.api.programs import BROKEN, PROGRAM, make_files

CELLS = {
    "load": "import rldsl\n%load_ext rldsl.notebook",
    "wrong": f"%%rlf plan\n{BROKEN}",
    "right": f"%%rlf plan --set lr=2e-6\n{PROGRAM}",
    "graph": "plan.graph",
    "time": "plan.simulate('h100x8')",
    "cluster": "plan.simulate('h100x9')",
    "saved": "plan.save('small.plan').name, plan.params['lr']",
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Cell -> what it holds once all have run."""
    folder = make_files(tmp_path_factory.mktemp("kernel"))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
            patch.setenv(name, str(folder / name.lower()))
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in CELLS.values()])
        NotebookClient(book, timeout=300, allow_errors=True, kernel_name="python3",
                       resources={"metadata": {"path": str(folder)}}).execute()
    assert (folder / "small.plan").is_file()
    return {name: [x for x in cell.outputs if x.output_type != "stream"] for name, cell in zip(CELLS, book.cells)}


@pytest.mark.thorough
def test_cells_hold_text_html_and_pictures(outputs: dict[str, list[Any]]) -> None:
    assert outputs["load"] == []
    assert "realloc" in outputs["right"][0].data["text/html"] and "realloc" in outputs["right"][0].data["text/plain"]
    assert outputs["graph"][0].data["image/svg+xml"].startswith("<svg")
    assert "critical path" in outputs["time"][0].data["text/html"]
    assert outputs["saved"][0].data["text/plain"] == "('small.plan', 2e-06)"


@pytest.mark.parametrize(("cell", "words"), [("wrong", ("RL0101", "did you mean `actor`?")),
                                             ("cluster", ("RL0091", "h100x8"))])
def test_mistakes_are_diagnostics(outputs: dict[str, list[Any]], cell: str, words: tuple[str, ...]) -> None:
    (error,) = outputs[cell]
    assert error.output_type == "error" and error.ename == "DiagnosticError"
    shown = "\n".join(error.traceback)
    assert all(word in shown for word in words) and "Traceback" not in shown and "rldsl/" not in shown
