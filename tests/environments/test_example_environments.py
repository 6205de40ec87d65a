"""The environments of examples/: what they answer and earn, and what the sandbox stops."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


SANDBOX = sys.modules["sandbox"] = module("sandbox")
REPAIR, WORDS, CALCULATOR = module("code_repair"), module("word_game"), module("calculator")


def test_calculator() -> None:
    env = CALCULATOR.Calculator()
    env.reset(answer=60, prompt="(12 + 3) * 4")
    assert env.get_reward() == 0
    assert env.calculate("(12 + 3) * -4") == "-60" and env.calculate(" 7 / 2") == "3.5"
    env.submit(60)
    assert env.get_reward() == 1
    env.submit(61)
    assert env.get_reward() == 1, "the first number counts"


@pytest.mark.parametrize("expression", ["", "2 **", "__import__('os')", "9 ** 9", "x", "True", "'a' * 3", "1 / 0",
                                        "(" * 99 + ")" * 99, "1" * 201])
def test_calculator_raises_for_all_else(expression: str) -> None:
    with pytest.raises((ValueError, SyntaxError, ZeroDivisionError)):
        CALCULATOR.Calculator().calculate(expression)


@pytest.mark.parametrize("guess, word, marks", [
    ("crane", "crane", "====="), ("slate", "crane", "..=.="), ("eerie", "crane", "..+.="), ("lolls", "world", ".=.=."),
    ("aabbb", "ccaac", "++..."), ("xyz", "abc", "...")])
def test_marks(guess: str, word: str, marks: str) -> None:
    assert WORDS.marked(guess, word) == marks


def test_word_game() -> None:
    game = WORDS.WordGame()
    game.extras["word"] = "Crane"
    assert game.init(["m"]) == (["m"], {})
    steps = [game.step(t) for t in ("I guess slate", "", "crank!", "trace", "My word: CRANE")]
    assert [s["reward"] for s in steps] == pytest.approx([0.4, 0, 0.4, 0, 0.2]) and sum(s["reward"] for s in steps) == 1
    assert [s["done"] for s in steps] == [False] * 4 + [True]
    assert "5 letters" in steps[1]["observations"][0]["content"] and "crank ====." in str(steps[2])


def repair(code: str, *tests: str) -> tuple[float, str]:
    env: Any = REPAIR.CodeRepair()
    env.reset(tests=tests or ("assert f(2) == 4", "assert f(3) == 9"), prompt="")
    said = env.run_tests(code)
    return env.get_reward(), said


def test_repair() -> None:
    assert repair("def f(x): return x * x") == (1, "assert f(2) == 4: passed\nassert f(3) == 9: passed")
    half, said = repair("def f(x): return 2 * x")
    assert half == 0.5 and "assert f(3) == 9: AssertionError" in said
    none, said = repair("def f(x) return")
    assert none == 0 and "was not run" in said and "SyntaxError" in said and "ended with status 1" in said


@pytest.mark.parametrize("code", ["raise SystemExit", "import os; os._exit(0)", "print('x 0 passed')", "", "while 1: 1/0",
                                  "import os, signal; os.kill(os.getpid(), 9)"])
def test_what_earns_nothing(code: str) -> None:
    reward, said = repair(code)
    assert reward == 0 and "passed" not in said.replace("x 0 passed", "")


def test_sandbox_stops_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SANDBOX, "LIMITS", SANDBOX.LIMITS.replace('("CPU", 5)', '("CPU", 1)'))
    assert "was killed" in SANDBOX.run("while True: pass")[0]
    monkeypatch.setattr(SANDBOX, "SECONDS", 0.5)
    start = time.monotonic()
    assert SANDBOX.run("import time; time.sleep(60)") == ("was killed after 1.0 s", "")
    assert time.monotonic() - start < 50


def test_sandbox_stops_memory_files_and_output(tmp_path: Path) -> None:
    assert "MemoryError" in SANDBOX.run("x = bytearray(2 << 30)")[1]
    big = tmp_path / "big"
    SANDBOX.run(f"open({str(big)!r}, 'wb').write(bytes(5 << 20))")
    assert not big.exists() or big.stat().st_size <= SANDBOX.FILE
    status, output = SANDBOX.run("while True: print('x' * 10000)")
    assert status and len(output) == SANDBOX.SHOWN
    assert "Too many open files" in SANDBOX.run("x = [open('/dev/null') for _ in range(99)]")[1]


def test_sandbox_has_a_directory_and_no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s3cr3t")
    code = "import os; open('a', 'w').write('x'); print(os.listdir(), os.environ.get('SECRET'), os.getcwd(), input())"
    status, output = SANDBOX.run(code, "hello")
    assert status == "" and output.startswith("['a'] None /") and output.endswith(" hello\n")
    assert not Path(output.split()[2]).exists()


def test_sandbox_has_no_network_where_there_are_namespaces() -> None:
    _, namespace = SANDBOX.run("import os; print(os.readlink('/proc/self/ns/net'))")
    if namespace.strip() == str(Path("/proc/self/ns/net").readlink()):
        pytest.skip("this system grants no network namespace")
    _, said = SANDBOX.run("import socket; s = socket.socket(); s.settimeout(2); s.connect(('127.0.0.1', 9))")
    assert "Network is unreachable" in said
