"""`rlc check`: fixes, warnings, the forms of output, exit status, and what it costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rldsl import api
from rldsl.cli import main
from rldsl.diag import Diagnostic, Fix
from rldsl.fix import apply
from rldsl.plan.codec import encode
from rldsl.report import render, to_json
from rldsl.source import SourceFile, Span
from rldsl.syntax.parse import grammar, warm
from tests.plan.sample import grpo
from tests.samples import thorough_between

GOOD = """data d = jsonl("d.jsonl", batch=4)
model m = causal_lm("m")
flow f(steps=2) {
  p = d.next()
  gen = m.generate(p, max_new_tokens=8) on mesh(0:8) dp=2 tp=4
  metric k = mean(gen.logprobs)
}
"""
UNUSED = GOOD.replace("flow f", 'model spare = causal_lm("m")\nflow f')


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def rlc(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def put(text: str, name: str = "p.rlf") -> Path:
    Path(name).write_text(text)
    return Path(name)


# ----------------------------------------------------------------------------------------------------- fixes

FIXES = [
    ("mean(gen", "mean(gne"), ("max_new_tokens", "max_new_token"), ("steps=2", "step=2"), ("metric k =", "metric k =="),
    ("dp=2 tp=4", "dp=3 tp=4"), ("tp=4", "ttp=4"), ('"m"', "'m'"), ('"m"', "“m”"), ("p = d", "p := d"),
    ("mean(gen.logprobs)", "mean(gen.logprobs"), ("\n}\n", "\n"), ("\n}\n", "\n}\n}\n"), ("p, max", "p max"),
    ("model m", "modle m"), ("gen = m", "gen == m"), ("d.next()", "d.next();"), ('causal_lm("m")', 'causal_lm("m)'),
    ("max_new_tokens=8", "max_new_tokens: 8"), ("causal_lm", "causal_llm"), ("gen.logprobs", "gen.logprob"),
    ("p = d", "p\u00a0= d"), ("flow f", "flow f"),
]


@pytest.mark.parametrize("right, wrong", FIXES, ids=[w.strip() for _, w in FIXES])
def test_fix_restores_the_program(right: str, wrong: str) -> None:
    file = put(GOOD.replace(right, wrong))
    if wrong != right:
        assert rlc("check", "p.rlf").exit_code == 1
        assert file.read_text() == GOOD.replace(right, wrong), "without --fix nothing is written"
    done = rlc("check", "--fix", "p.rlf")
    assert done.exit_code == 0, done.output
    assert api.check(file.read_text()) == ()
    assert file.read_text().replace(" =", "=").split() == GOOD.replace(" =", "=").split()
    assert [p.name for p in Path().iterdir() if p.name != "cache"] == ["p.rlf"]


def test_fixes_of_syntax_bring_names_to_light() -> None:
    file = put(GOOD.replace('"m"', "'m'").replace("mean(gen", "meen(gen"))
    assert "1 of 1" in rlc("check", "p.rlf").output
    assert "fixed 2 errors" in rlc("check", "--fix", "p.rlf").output
    assert file.read_text() == GOOD


def test_what_is_not_sure_stays() -> None:
    text = GOOD.replace("dp=2 tp=4", "dp=4 tp=4").replace("mean(gen", "mean(xyzzy")
    file = put(text)
    assert rlc("check", "--fix", "p.rlf").exit_code == 1
    assert file.read_text() == text


@pytest.mark.parametrize("other", ['use "other.rlf" (twice)\n' + GOOD, 'use std.ppo (gaee)\n' + GOOD])
def test_other_files_are_not_touched(other: str) -> None:
    broken = "fn twice(x: seq) -> seq { return 2 * y }\n"
    put(broken, "other.rlf")
    put(other)
    rlc("check", "--fix", "p.rlf")
    assert Path("other.rlf").read_text() == broken


def test_the_library_is_not_touched() -> None:
    import rldsl.stdlib

    file = Path(rldsl.stdlib.__file__).parent / "ppo.rlf"
    before = file.read_bytes()
    done = rlc("check", "--fix", str(file))
    assert done.exit_code == 2 and "library" in done.output and file.read_bytes() == before


def test_a_link_stays_a_link_and_a_mode_a_mode() -> None:
    target = put(GOOD.replace("mean(gen", "mean(gne"), "real.rlf")
    target.chmod(0o640)
    Path("p.rlf").symlink_to("real.rlf")
    assert rlc("check", "--fix", "p.rlf").exit_code == 0
    assert Path("p.rlf").is_symlink() and target.read_text() == GOOD and target.stat().st_mode & 0o777 == 0o640


def fixed(text: str, *edits: tuple[int, int, str], name: str = "a") -> Diagnostic:
    file = SourceFile(name, text)
    return Diagnostic("RL0001", "x", fix=Fix(tuple((Span(file, a, b), new) for a, b, new in edits)))


def test_apply_takes_fixes_whole_and_apart() -> None:
    text = "abcdef"
    file = SourceFile("a", text)
    assert apply(file, [fixed(text, (0, 1, "X"), (4, 5, "Y"))]) == ("XbcdYf", 1)
    assert apply(file, [fixed(text, (0, 2, "X")), fixed(text, (1, 3, "Y"), (5, 6, "Z"))]) == ("Xcdef", 1)
    assert apply(file, [fixed(text, (0, 2, "X")), fixed(text, (4, 4, "-"))]) == ("Xcd-ef", 2)
    assert apply(file, [fixed("other text", (0, 2, "X"))]) == (text, 0)
    assert apply(file, [fixed(text, (0, 99, "X"))]) == (text, 0)
    assert apply(file, [fixed(text, (0, 2, "X"), name="b"), Diagnostic("RL0001", "x")]) == (text, 0)


def test_fixes_in_json() -> None:
    put(GOOD.replace("mean(gen", "mean(gne"))
    [found] = json.loads(rlc("check", "--output-format", "json", "p.rlf").output)["diagnostics"]
    [edit] = found["fix"]
    assert edit["text"] == "gen" and edit["span"]["line"] == 6 and edit["span"]["column"] == 19
    assert json.loads(to_json([Diagnostic("RL0001", "x")]))["diagnostics"][0]["fix"] is None


# ----------------------------------------------------------------------------------------------------- files


def test_messages_about_files(golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The codes that no program shows: RL0091 to RL0096."""
    put(GOOD)
    Path("latin.rlf").write_bytes(GOOD.replace("flow f", "# caf\u00e9\nflow f").encode("latin-1"))
    Path("p.plan").write_bytes(encode(grpo()))
    Path("folder").mkdir()
    asked = {"RL0091": ("check", "q.rlf"), "RL0092": ("check", "folder"), "RL0093": ("check", "latin.rlf"),
             "RL0094": ("new", "ppo", "-o", "none/p.rlf"), "RL0096": ("run", "p.plan", "--nproc", "99")}
    for code, arguments in asked.items():
        done = rlc(*arguments)
        assert done.exit_code == 1 and code in done.output, done.output
        golden(f"diagnostics/files/{code}.txt", done.output)


# -------------------------------------------------------------------------------------------------- warnings


def test_warnings_do_not_fail_except_with_strict() -> None:
    put(UNUSED)
    done = rlc("check", "p.rlf")
    assert done.exit_code == 0 and "warning[RL0901]" in done.output and "1 warning" in done.output
    assert rlc("check", "--strict", "p.rlf").exit_code == 1
    put(GOOD)
    assert rlc("check", "--strict", "p.rlf").exit_code == 0


def test_warnings_keep_quiet_beside_errors() -> None:
    put(UNUSED.replace("mean(gen", "mean(xyzzy"))
    assert "RL0901" not in rlc("check", "p.rlf").output


def test_warnings_for_machines() -> None:
    put(UNUSED)
    shown = rlc("check", "--output-format", "github", "p.rlf").output
    assert shown.startswith("::warning file=p.rlf,line=3,col=7,title=RL0901")
    [found] = json.loads(rlc("check", "--output-format", "json", "p.rlf").output)["diagnostics"]
    assert (found["severity"], found["code"]) == ("warning", "RL0901")


LINTS = [
    ("param lr = 1\n", "RL0901", "lr"), ("use std.ppo (gae)\n", "RL0901", "gae"),
    ("mesh a = mesh(0:8)\n", "RL0901", "a"),
    ("state s = 1\n", "RL0901", "s"), ("fn t(x: seq) -> seq { return x }\n", "RL0901", "t"),
    ("fn t(x: seq) -> seq { return t2(x) }\nfn t2(x: seq) -> seq { return x }\n", "RL0901", "t"),
    ("place m.generate on mesh(0:4) dp=4\n", "RL0902", "place m.generate on mesh(0:4) dp=4"),
    ("place *.* dp=2\n", "RL0902", "place *.* dp=2"),
]


@pytest.mark.parametrize("top, code, underlined", LINTS)
def test_lints_of_declarations(top: str, code: str, underlined: str) -> None:
    [found] = api.examine(top + GOOD)
    assert (found.code, found.severity) == (code, "warning") and found.span is not None
    assert found.span.text == underlined, render([found])


FLOW_LINTS = [("x = mean(len(gen))", ["RL0901"]), ("_x = mean(len(gen))", []),
              ("a, b = gae(gen.logprobs, gen.logprobs)", ["RL0901"]),
              ("a, b = gae(gen.logprobs, gen.logprobs)\n  metric z = mean(a)", []),
              ("metric z = mean(where(len(gen) == 0.5, 1, 0))", ["RL0903"]),
              ("metric z = mean(where(len(gen) == 2, 1, 0))", []),
              ("metric z = mean(where(0.25 != len(gen), 1, 0))", ["RL0903"])]


@pytest.mark.parametrize("statement, codes", FLOW_LINTS)
def test_lints_of_the_flow(statement: str, codes: list[str]) -> None:
    use = "use std.ppo (gae)\n" if "gae" in statement else ""
    found = api.examine(use + GOOD.replace("\n}", f"\n  {statement}\n}}"))
    assert [d.code for d in found] == codes, render(found)


def test_a_rule_that_only_a_placement_file_overrides_is_no_slip() -> None:
    base = GOOD.replace(" on mesh(0:8) dp=2 tp=4", "")
    text = "place m.* on mesh(0:8) dp=8\n" + base
    rules = SourceFile("fast.rlf", "mesh four = mesh(0:4)\nplace m.* on four dp=4\n")
    assert api.examine(text, place=rules) == ()
    assert api.examine(text) == ()
    again = SourceFile("fast.rlf", "place m.* on mesh(0:4) dp=4\nplace @gen on mesh(0:2) dp=2\n")
    assert [d.code for d in api.examine(text, place=again)] == ["RL0902"]


def test_options_without_a_mesh_on_a_computation_say_that_they_are_ignored() -> None:
    text = GOOD.replace("\n}", "\n  x = mean(len(gen)) * 2\n  metric y = x\n}") + "place @x mbs=2\n"
    [found] = api.examine(text)
    assert found.code == "RL0902" and found.span is not None and found.span.text == "mbs=2"


@pytest.mark.parametrize("name", sorted(p.name for p in (Path(__file__).parents[2] / "examples").glob("*.rlf")))
def test_examples_have_no_warnings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    source = api.read_source(f"examples/{name}")
    found = api.examine(source.text, source.name)
    assert not found, render(found)


# ------------------------------------------------------------------------------------------------------ cost

CHECK = """
import sys
calls = 0
def count(frame, event, arg):
    global calls
    calls += event in ("call", "c_call")
sys.setprofile(count)
from click.testing import CliRunner
from rldsl.cli import main
result = CliRunner().invoke(main, ["check", "p.rlf"])
heavy = {"torch", "transformers", "numpy", "safetensors", "networkx", "yaml"} & sys.modules.keys()
print(result.exit_code, ",".join(sorted(heavy)) or "none", calls)
"""


@pytest.mark.thorough
def test_check_is_quick_and_light() -> None:
    """The aim is 0.5 s of CPU with a warm cache for the longest page of ours: some 800,000 calls of functions."""
    pages = sorted((Path(__file__).parents[2] / "examples").glob("*.rlf"), key=lambda p: p.stat().st_size)
    put(pages[-1].read_text().replace('use py "rewards.py"', 'use py "std/rewards.py"'))
    for _ in range(2):  # the second finds the tables of the grammar
        done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, check=True,
                              env=os.environ | {"XDG_CACHE_HOME": str(Path("cache").resolve())})
    code, heavy, calls = done.stdout.split()
    assert (code, heavy) == ("0", "none") and int(calls) < 1_200_000, done.stdout
    assert list(Path("cache/rldsl").glob("grammar-*.json"))


@pytest.mark.parametrize("damage", thorough_between(["", "{", "[]", '{"key": "other"}', '{"key": 1, "data": {}}', "null", "\x00"]))
def test_a_damaged_cache_is_replaced(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rldsl.syntax import parse, table

    monkeypatch.setattr(parse, "_MADE", [])
    warm(tmp_path / "c")
    [file] = (tmp_path / "c").iterdir()
    whole = file.read_text()
    file.write_text(damage)
    monkeypatch.setattr(parse, "_MADE", [])
    parse.parse_recovering.cache_clear()  # so that GOOD is parsed with what was found
    warm(tmp_path / "c")
    assert table.load(file.read_text(), grammar(), parse._FreeNewlines()) is not None and api.check(GOOD) == ()
    assert table.load(whole.replace(table.key(grammar()), "0" * 64), grammar(), parse._FreeNewlines()) is None


def test_tables_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that runs commands one after the other, as a notebook does, has one parser."""
    from rldsl.syntax import parse

    monkeypatch.setattr(parse, "_MADE", [])
    warm(tmp_path / "c")
    [made] = parse._MADE
    [file] = (tmp_path / "c").iterdir()
    file.write_text("{")  # what is read again would be made again
    warm(tmp_path / "c")
    assert parse._MADE == [made] and file.read_text() == "{"


def test_the_cached_tables_are_the_computed_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rldsl.syntax import parse, table

    text = grammar()
    made = table.make(text, parse._FreeNewlines())
    read = table.load(table.dump(made, text), text, parse._FreeNewlines())
    assert read is not None and read.parse(GOOD) == made.parse(GOOD)


def test_a_cache_that_cannot_be_written_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rldsl.syntax import parse

    (tmp_path / "file").write_text("")
    monkeypatch.setattr(parse, "_MADE", [])
    warm(tmp_path / "file" / "below")
    monkeypatch.setattr(parse, "_MADE", [])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    put(GOOD)
    assert rlc("check", "p.rlf").exit_code == 0
