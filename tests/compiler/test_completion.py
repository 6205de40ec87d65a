"""Tab completion, as a shell asks for it."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner

from rldsl.cli import main


def completed(*words: str) -> list[tuple[str, str]]:
    """(type, value) for the last word. What has the type "file" or "dir" the shell completes by itself."""
    *before, begin = words
    found = BashComplete(main, {}, "rlc", "_RLC_COMPLETE").get_completions(list(before), begin)
    return [(item.type, item.value) for item in found]


def values(*words: str) -> list[str]:
    return [value for kind, value in completed(*words) if kind == "plain"]


def test_commands_and_options() -> None:
    assert values("compi") == ["compile"] and values("explain") == ["explain", "explain-placement"]
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


PROGRAM = """param base = "models/x"   # a directory
  param lr = 1e-6
parameter = 3
# param no = 1
"""


@pytest.mark.parametrize("words, found", [
    (("check", "p.rlf", "--set", ""), ["base=", "lr="]), (("run", "p.rlf", "--set", "l"), ["lr="]),
    (("run", "--nproc", "2", "p.rlf", "--set", "ba"), ["base="]), (("run", "p.rlf", "--set", "no"), []),
    (("run", "p.rlf", "--set", "lr=1"), []), (("run", "--set", ""), []), (("run", "no.rlf", "--set", ""), []),
    (("run", "p.plan", "--set", ""), []), (("run", "bytes.rlf", "--set", ""), [])])
def test_params_of_the_program(words: tuple[str, ...], found: list[str], tmp_path: Path,
                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.rlf").write_text(PROGRAM)
    Path("bytes.rlf").write_bytes(b"\xff\xfe")
    assert values(*words) == found


def test_metrics_of_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("a", '{"step": 1, "reward": 1, "actor/loss": 2}\n'), ("b", "broken\n"), ("c", "")):
        Path(name).mkdir()
        Path(name, "metrics.jsonl").write_text(text)
    assert values("plot", "a", "--metric", "") == ["reward", "actor/loss"]
    assert values("plot", "a", "--metric", "re") == ["reward"]
    for word in ("b", "c", "nowhere"):
        assert values("plot", word, "--metric", "") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_each_shell(shell: str) -> None:
    found = CliRunner().invoke(main, ["completion", shell])
    assert found.exit_code == 0 and f"_RLC_COMPLETE={shell}_complete" in found.output
    as_json = json.loads(CliRunner().invoke(main, ["completion", shell, "--json"]).output)
    assert as_json["script"] == found.output.rstrip("\n") or as_json["script"] == found.output


@pytest.mark.parametrize("shell, words", [("bash", "compopt -o nospace"), ("zsh", "-S '' -a alone"),
                                          ("zsh", "before_value -U -S ''")])
def test_no_space_follows_the_name_of_a_param(shell: str, words: str) -> None:
    """Click's scripts are changed for that: this fails if their text is another one."""
    assert CliRunner().invoke(main, ["completion", shell]).output.count(words) == 1


def test_bash_on_a_terminal(tmp_path: Path) -> None:
    """`--set l` and Tab: the value can be typed at once."""
    program = shutil.which("bash")
    if program is None:
        pytest.skip("there is no bash here")
    (tmp_path / "p.rlf").write_text(PROGRAM)
    (tmp_path / "rlc").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m rldsl.cli "$@"\n')
    (tmp_path / "rlc").chmod(0o755)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.environ.update(PATH=f"{tmp_path}:{os.environ['PATH']}", TERM="dumb", PS1="> ", HISTFILE="/dev/null")
        os.execv(program, [program, "--norc", "--noprofile", "-i"])
    seen = ""
    try:
        for typed, wanted in (('eval "$(rlc completion bash)"; echo RE""ADY\n', "READY"),
                              ("rlc compile p.rlf --set l\t", "--set lr="), ("1e-3", "lr=1e-3")):
            os.write(terminal, typed.encode())
            while wanted not in seen:
                assert select.select([terminal], [], [], 120)[0], seen
                seen += os.read(terminal, 4096).decode(errors="replace")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)


@pytest.mark.parametrize("arguments", [[], ["tcsh"], ["bash", "zsh"]])
def test_other_shells_have_none(arguments: list[str]) -> None:
    assert CliRunner().invoke(main, ["completion", *arguments]).exit_code == 2


SHELLS = {
    "bash": """eval "$(rlc completion bash)"
        COMP_WORDS=(rlc compile p.rlf --set l); COMP_CWORD=4; _rlc_completion rlc; echo "${COMPREPLY[*]}" """,
    "fish": "rlc completion fish | source; complete -C 'rlc compile p.rlf --set l'",
    "zsh": """autoload -Uz compinit; compinit -u -D; eval "$(rlc completion zsh)"; print -r -- "lr= $_comps[rlc]" """,
}


@pytest.mark.parametrize("shell", SHELLS)
def test_in_the_shell_itself(shell: str, tmp_path: Path) -> None:
    """bash and fish complete a param; zsh knows which function completes `rlc` (to complete, it needs a terminal)."""
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"there is no {shell} here")
    (tmp_path / "p.rlf").write_text(PROGRAM)
    rlc = tmp_path / "bin/rlc"
    rlc.parent.mkdir()
    rlc.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m rldsl.cli "$@"\n')
    rlc.chmod(0o755)
    path = f"{rlc.parent}:{os.environ['PATH']}"
    found = subprocess.run([program, "-c", SHELLS[shell]], cwd=tmp_path, env={**os.environ, "PATH": path}, text=True,
                           capture_output=True, timeout=300)
    assert "lr=" in found.stdout and "base=" not in found.stdout, found
    assert shell != "zsh" or "_rlc_completion" in found.stdout


def test_every_argument_completes_something() -> None:
    """A new command whose argument is a plain text would complete nothing."""
    for name, command in main.commands.items():
        for parameter in command.params:
            if (name, parameter.name) == ("push", "name"):  # a repository that need not exist yet
                continue
            if parameter.param_type_name == "argument":
                context = command.make_context(name, [], resilient_parsing=True)
                assert parameter.shell_complete(context, ""), f"{name} {parameter.name}"
