"""Tab completion, as a shell asks for it."""

from __future__ import annotations

import pytest
from click.shell_completion import BashComplete

from rldsl.cli import main


def completed(*words: str) -> list[tuple[str, str]]:
    """(type, value) for the last word. What has the type "file" or "dir" the shell completes by itself."""
    *before, begin = words
    found = BashComplete(main, {}, "rlc", "_RLC_COMPLETE").get_completions(list(before), begin)
    return [(item.type, item.value) for item in found]


def values(*words: str) -> list[str]:
    return [value for kind, value in completed(*words) if kind == "plain"]


def test_commands_and_options() -> None:
    assert values("comp") == ["compile"] and values("explain") == ["explain", "explain-placement"]
    assert "--place" in values("compile", "--p") and values("graph", "--format", "s") == ["svg"]
    assert values("check", "--output-format", "") == ["text", "json", "github"]
    assert "--output" not in values("check", "--outp"), "the earlier name is not offered"


@pytest.mark.parametrize("words", [
    ("check", ""), ("compile", "p"), ("fmt", ""), ("graph", ""), ("run", ""), ("sim", ""), ("search", ""), ("profile", ""),
    ("explain-placement", ""), ("show", ""), ("verify", ""), ("emit", ""), ("report", ""), ("diff", ""), ("diff", "a.plan", ""),
    ("compile", "p.rlf", "-o", ""), ("sim", "p.rlf", "--trace", ""), ("graph", "p.rlf", "-o", "")])
def test_files(words: tuple[str, ...]) -> None:
    assert ("file", words[-1]) in completed(*words)


@pytest.mark.parametrize("words", [("runs", ""), ("plot", ""), ("postmortem", ""), ("run", "p.rlf", "--out", "")])
def test_directories(words: tuple[str, ...]) -> None:
    assert completed(*words) == [("dir", words[-1])]


def test_words_of_the_language() -> None:
    assert "ppo" in values("new", "") and values("new", "pp") == [x for x in values("new", "") if x.startswith("pp")]
    assert "RL0304" in values("explain", "RL03") and values("explain", "nothing") == []
    assert "search" in values("compile", "p.rlf", "--place", "") and ("file", "") in completed("compile", "--place", "")
    assert "h100x8" in values("sim", "a.plan", "--cluster", "h100")
    assert values("compile", "p.rlf", "--print-after", "real") == ["reallocs"]


def test_every_argument_completes_something() -> None:
    """A new command whose argument is a plain text would complete nothing."""
    for name, command in main.commands.items():
        for parameter in command.params:
            if parameter.param_type_name == "argument":
                context = command.make_context(name, [], resilient_parsing=True)
                assert parameter.shell_complete(context, ""), f"{name} {parameter.name}"
