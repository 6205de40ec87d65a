"""Programs in cells: IPython's own shell, in this process, shows plans, pictures and diagnostics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

from tests.api.programs import BROKEN, PROGRAM, make_files


@dataclass(frozen=True, slots=True)
class Ran:
    """What a cell showed. rich: what it displayed, by media type."""

    ok: bool
    error: str
    text: str
    rich: dict[str, Any]


class Notebook:
    """One shell with the extension loaded."""

    def __init__(self) -> None:
        quiet = Config()
        quiet.HistoryManager.enabled = False
        self.shell = InteractiveShell.instance(config=quiet)  # the one that `display` shows things in
        formatter = self.shell.display_formatter
        formatter.active_types = formatter.format_types  # a terminal shows text alone
        assert self("%load_ext rldsl.notebook").ok

    def __call__(self, cell: str) -> Ran:
        with capture_output() as seen:
            done = self.shell.run_cell(cell)
        rich = {kind: value for out in seen.outputs for kind, value in out.data.items()}
        if done.success and done.result is not None:
            rich |= self.shell.display_formatter.format(done.result)[0]
        error = done.error_in_exec or done.error_before_exec
        return Ran(done.success, type(error).__name__ if error else "", seen.stdout + seen.stderr, rich)


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    folder = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patch, chdir(make_files(folder)):
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        yield Notebook()
        InteractiveShell.clear_instance()


@pytest.fixture
def with_plan(notebook: Notebook) -> Notebook:
    """A notebook that has a value `plan`, whichever tests this process has run before."""
    if "plan" not in notebook.shell.user_ns:
        assert notebook(f"%%rlf plan\n{PROGRAM}").ok
    return notebook


def test_a_cell_is_checked(notebook: Notebook) -> None:
    ran = notebook(f"%%rlf\n{PROGRAM}")
    assert ran.ok and "no errors found" in ran.rich["text/plain"] and "no errors" in ran.rich["text/html"]


def test_a_cell_becomes_a_plan(notebook: Notebook) -> None:
    ran = notebook(f"%%rlf plan --set lr=2e-6\n{PROGRAM}")
    assert ran.ok and ran.rich["text/html"].startswith("<pre") and "realloc" in ran.rich["text/html"]
    plan = notebook.shell.user_ns["plan"]
    assert plan.params["lr"] == 2e-6 and "&lt;cell&gt;" in ran.rich["text/html"]
    assert plan.preview().strip() == ran.rich["text/plain"]


def test_python_gives_values(notebook: Notebook) -> None:
    notebook("rate, rule = 4e-6, 'ref.logprobs on mesh(2:4) dp=2'")
    ran = notebook(f'%%rlf given --set lr=$rate --set "steps=7" --on "{{rule}}"\n{PROGRAM}')
    plan = notebook.shell.user_ns["given"]
    assert ran.ok and plan.params["lr"] == 4e-6 and plan.params["steps"] == 7
    assert any(m.ranks == ((2, 4),) for m in plan.record.meshes)


@pytest.mark.parametrize(("expression", "media", "part"), [
    ("plan.graph", "image/svg+xml", "<svg"), ("plan.report()", "text/html", "<iframe"),
    ("plan.memory", "text/html", "<table"), ("plan.simulate('h100x8')", "text/html", "critical path"),
    ("plan.diff(plan)", "text/html", "no differences"), ("rldsl.check(broken)", "text/html", "RL0101"),
    ("rldsl.check(broken)", "text/plain", "not defined here"),
])
def test_views_show_themselves(with_plan: Notebook, expression: str, media: str, part: str) -> None:
    with_plan.shell.push({"broken": BROKEN})
    ran = with_plan(f"import rldsl\n{expression}")
    assert ran.ok and part in ran.rich[media]


def test_a_cell_may_be_kept(notebook: Notebook) -> None:
    ran = notebook(f"%%rlf kept --write kept.rlf\n{PROGRAM}")
    assert ran.ok and Path("kept.rlf").read_text() == PROGRAM
    assert notebook.shell.user_ns["kept"].record.header.program == "kept.rlf"


def test_a_cell_may_be_kept_under_a_name_with_a_blank(notebook: Notebook) -> None:
    """IPython leaves quotes where they are."""
    for line in ('kept2 --write "my cell.rlf"', "--write 'my cell.rlf'"):
        Path("my cell.rlf").unlink(missing_ok=True)
        assert notebook(f"%%rlf {line}\n{PROGRAM}").ok
        assert Path("my cell.rlf").read_text() == PROGRAM and not list(Path().glob("*[\"']*"))
    assert notebook.shell.user_ns["kept2"].record.header.program == "my cell.rlf"


def test_rules_of_a_cell_are_checked_without_a_name(notebook: Notebook) -> None:
    ran = notebook(f'%%rlf --on "actor.train on mesh(0:4)"\n{PROGRAM}')
    assert ran.ok and "no errors found" in ran.rich["text/plain"]
    wrong = notebook(f'%%rlf --on "actor.trian on mesh(0:4)"\n{PROGRAM}')
    assert_told(wrong, "RL0", "actor.trian on mesh(0:4)")


# ------------------------------------------------------------------------------------------------- mistakes


def assert_told(ran: Ran, *parts: str) -> None:
    """Diagnostics, and nothing of Python."""
    assert not ran.ok and "Traceback" not in ran.text and "rldsl/" not in ran.text
    assert all(part in ran.text for part in parts), ran.text


@pytest.mark.parametrize("name", ["", " plan2"])
@pytest.mark.parametrize(("cell", "parts"), [
    (BROKEN, ("RL0101", "actr.generate(prompt, n=2", "did you mean `actor`?")),
    (PROGRAM.replace("flow small(", "flow small(("), ("RL00", "<cell>:12")),
    ("", ("RL0109", "no flow")),
])
def test_a_wrong_program_shows_diagnostics(notebook: Notebook, name: str, cell: str, parts: tuple[str, ...]) -> None:
    ran = notebook(f"%%rlf{name}\n{cell or ' '}")
    assert_told(ran, *parts)
    assert ran.error == "DiagnosticError" and "plan2" not in notebook.shell.user_ns


@pytest.mark.parametrize(("line", "parts"), [
    ("plan3 --set lrr=1", ("RL0106", "did you mean `lr`?")), ("plan3 --set lr=fast", ("RL0205", "not a number")),
    ("plan3 --set base=models/gone", ("models/gone",)), ("plan3 --place gone.rlf", ("RL0091", "gone.rlf")),
    ("plan3 --on 'actor.train on mesh(0:9)'", ("RL03", "actor.train on mesh(0:9)")),
    ("plan3 --write nowhere/at/all.rlf", ("RL0094",)),
])
def test_wrong_options_show_diagnostics(notebook: Notebook, line: str, parts: tuple[str, ...]) -> None:
    ran = notebook(f"%%rlf {line}\n{PROGRAM}")
    assert_told(ran, *parts)
    assert " -o" not in ran.text, "advice for a command line"
    assert "plan3" not in notebook.shell.user_ns


@pytest.mark.parametrize(("line", "part"), [("3plan", "cannot be the name"), ("plan --sett lr=1", "--sett"),
                                            ("plan --set lr", "NAME=VALUE"), ("class", "cannot be the name"),
                                            ("plan --set", "expected one argument"),
                                            ("plan --set lr=$none", "no Python variable `none`"),
                                            ("plan --set lr={none}", "no Python variable `none`")])
def test_wrong_usage_is_told_in_a_line(notebook: Notebook, line: str, part: str) -> None:
    ran = notebook(f"%%rlf {line}\n{PROGRAM}")
    assert not ran.ok and ran.error == "UsageError" and part in ran.text and "Traceback" not in ran.text


@pytest.mark.parametrize(("expression", "part"), [
    ("rldsl.compile(broken)", "RL0101"), ("plan.simulate('h100x9')", "8 per node"),
    ("plan.text(rank=9)", "RL0608"), ("rldsl.load('gone.plan')", "RL0091"),
])
def test_mistakes_of_other_cells_show_diagnostics(with_plan: Notebook, expression: str, part: str) -> None:
    notebook = with_plan
    notebook.shell.push({"broken": BROKEN})
    assert_told(notebook(f"import rldsl\n{expression}"), part)


def test_mistakes_of_python_stay_tracebacks(with_plan: Notebook) -> None:
    ran = with_plan("plan.simulat('h100x8')")
    assert not ran.ok and ran.error == "AttributeError" and "Traceback" in ran.text
