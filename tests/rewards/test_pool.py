"""The pool: the same numbers whatever the workers, one message for every mistake, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rldsl.plan.model import Function
from rldsl.runtime.rewards.pool import RewardPool
from rldsl.runtime.rewards.worker_process import LONGEST_LINE
from tests.rewards.functions import EACH, ROWS, gone, lives, mistake, noted, written
from tests.samples import thorough_between

ON_17 = "def one(row):\n    if row['completion'] == '17':\n        {}\n    return float(row['completion'])\n" + EACH


@pytest.mark.parametrize("count", thorough_between([0, 1, 2, 3, 7, 40, 500]))
def test_the_same_numbers_for_any_number_of_workers(tmp_path: Path, count: int) -> None:
    function = written(tmp_path, "def score(rows):\n    return [int(r['completion']) / 7 for r in rows]\n")
    rows = [{"prompt": "", "completion": str(i)} for i in range(count)]
    found = []
    for workers in (0, 1, 3):
        with RewardPool([function], workers) as pool:
            found.append(pool.call(function, rows))
    assert found == [[i / 7 for i in range(count)]] * 3


def test_several_functions_and_calls(tmp_path: Path) -> None:
    one, two = (written(tmp_path, f"def score(rows):\n    return [{i}] * len(rows)\n", file=f"f{i}.py") for i in (1, 2))
    with RewardPool([one, two], 2) as pool:
        assert [pool.call(f, ROWS)[0] for f in (one, two, one, two)] == [1, 2, 1, 2]


def test_rows_arrive_as_in_the_process_itself(tmp_path: Path) -> None:
    """Types, characters, and what JSON does not know."""
    from datetime import date

    row = {"prompt": "é\ud800\0", "completion": "", "a": [1, 2.5, None, True], "b": {"c": "d"}, "n": 10**30, "x": 0.1,
           "day": date(2026, 1, 2), "t": (1, 2), "images": [{"bytes": b"\x89PNG\0", "path": None}, b""]}
    body = ("def score(rows):\n    assert [repr(r) for r in rows] == [WANTED] * 2, repr(rows[0])\n    return [1] * 2\n")
    wanted = repr(row | {"day": "2026-01-02", "t": [1, 2]})
    function = written(tmp_path, f"WANTED = {wanted!r}\n{body}")
    for workers in (0, 2):
        with RewardPool([function], workers) as pool:
            assert pool.call(function, [row, row]) == [1, 1]


def test_workers_load_nothing_heavy(tmp_path: Path) -> None:
    body = "import sys\ndef score(rows):\n    return [float('torch' in sys.modules) for r in rows]\n"
    function = written(tmp_path, body)
    with RewardPool([function], 1) as pool:
        assert set(pool.call(function, ROWS)) == {0.0}


def test_no_functions_no_workers() -> None:
    with RewardPool([], 4) as pool:
        assert pool.workers == []


def test_what_is_printed_comes_with_the_worker(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    body = ("import os, sys\nprint('loaded')\ndef score(rows):\n    print('one\\ntwo', end='')\n"
            "    print('ü', file=sys.stderr)\n    os.write(1, b'raw\\xff\\n')\n    sys.stdout.write('end')\n"
            "    return [0] * len(rows)\n")
    function = written(tmp_path, body)
    with RewardPool([function], 1, rank=3) as pool:
        pool.call(function, ROWS[:2])
    out, err = capfd.readouterr()
    assert out == "" and err.splitlines() == [f"rank 3 worker 0 | {x}" for x in
                                              ("loaded", "one", "twoü", "raw\\xff", "end")]


def test_much_output_blocks_nobody(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    function = written(tmp_path, "def score(rows):\n    print('x' * 1_000_000)\n    return [0] * len(rows)\n")
    with RewardPool([function], 2) as pool:
        assert len(pool.call(function, ROWS)) == 40
    assert capfd.readouterr().err.count("x" * 1_000_000) == 8


@pytest.mark.parametrize("ends", [True, False])
def test_a_line_that_does_not_end_is_cut(tmp_path: Path, capfd: pytest.CaptureFixture, ends: bool) -> None:
    """50 MB: all of it is read, so that the function goes on, and a part of it is kept."""
    body = ("import sys\ndef score(rows):\n    for _ in range(50):\n        sys.stdout.write('x' * 1_000_000)\n"
            f"    print('end' * {ends}, end='\\n' * {ends})\n    return [3] * len(rows)\n")
    function = written(tmp_path, body)
    with RewardPool([function], 1) as pool:
        assert pool.call(function, ROWS[:2]) == [3, 3]
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and err.count("x") == LONGEST_LINE
    assert f"x ... ({50_000_000 + 3 * ends - LONGEST_LINE:,} more bytes omitted)\n" in err


def test_lines_after_one_that_was_cut_are_whole(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    body = "def score(rows):\n    print('x' * 3_000_000)\n    print('y' * 9)\n    return [0] * len(rows)\n"
    function = written(tmp_path, body)
    with RewardPool([function], 1) as pool:
        pool.call(function, ROWS[:2])
    assert capfd.readouterr().err.splitlines()[1:] == ["rank 0 worker 0 | " + "y" * 9]


def test_reading_stdin_finds_it_empty(tmp_path: Path) -> None:
    function = written(tmp_path, "import sys\ndef score(rows):\n    return [len(sys.stdin.read())] * len(rows)\n")
    with RewardPool([function], 1) as pool:
        assert set(pool.call(function, ROWS)) == {0}


# what the function does on row 17; code, words of the title, line
ROW_MISTAKES = {
    "raises": ("row['label']", "RL0775", "`score` raised: KeyError: 'label'", ":3"),
    "exits": ("raise SystemExit(3)", "RL0775", "`score` raised: SystemExit: 3", ":3"),
    "own_error": ("raise type('Odd', (BaseException,), {'__str__': lambda s: 1/0})()", "RL0775", "`score` raised: Odd",
                  ":3"),
    "recursion": ("one(row)", "RL0775", "`score` raised: RecursionError", ":3"),
    "nan": ("return float('nan')", "RL0776", "`score` returned nan for row 17 (rows.jsonl:18)", ""),
    "inf": ("return 1e39", "RL0776", "`score` returned 1e+39 for row 17 (rows.jsonl:18)", ""),
    "none": ("return None", "RL0776", "`score` returned None for row 17 (rows.jsonl:18), not a number", ""),
    "text": ("return '1'", "RL0776", "`score` returned a str for row 17 (rows.jsonl:18), not a number", ""),
}


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("name", thorough_between(ROW_MISTAKES))
def test_a_mistake_on_a_row(tmp_path: Path, name: str, workers: int) -> None:
    what, code, title, line = ROW_MISTAKES[name]
    found = mistake(written(tmp_path, ON_17.format(what)), workers)
    assert (found.code, found.title[: len(title)], found.place) == (code, title, f"{tmp_path}/rewards.py{line}")
    assert "prompt: 17+1=" in found.notes and found.help
    assert "row 17 (rows.jsonl:18)" in " ".join([found.title, *found.notes])


# the same, of what ends or hangs a process
PROCESS_MISTAKES = {
    "loops": ("while True: pass", "RL0777", "`score` took more than 1 s for row 17 (rows.jsonl:18)", ":3"),
    "sleeps": ("__import__('time').sleep(100)", "RL0777", "`score` took more than 1 s for row 17 (rows.jsonl:18)",
               ":3"),
    "backtracks": ("__import__('re').match('(a+)+b', 'a' * 60)", "RL0777", "`score` took more than 1 s f", ":3"),
    "stops": ("__import__('os').kill(__import__('os').getpid(), 19)", "RL0777", "`score` took more than 1 s f", ""),
    "leaves": ("__import__('os')._exit(0)", "RL0778",
               "`score` ended its process on row 17 (rows.jsonl:18) (exit status 0)", ""),
    "crashes": ("__import__('ctypes').string_at(0)", "RL0778",
                "`score` ended its process on row 17 (rows.jsonl:18) (killed by SIGSEGV)", ":3"),
    "aborts": ("__import__('os').abort()", "RL0778",
               "`score` ended its process on row 17 (rows.jsonl:18) (killed by SIGABRT)", ":3"),
    "killed": ("__import__('os').kill(__import__('os').getpid(), 9)", "RL0778",
               "`score` ended its process on row 17 (rows.jsonl:18) (killed by SIGKILL)", ""),
}


@pytest.mark.parametrize("name", thorough_between(PROCESS_MISTAKES))
def test_a_row_that_takes_the_process_along(tmp_path: Path, name: str) -> None:
    what, code, title, line = PROCESS_MISTAKES[name]
    found = mistake(written(tmp_path, ON_17.format(what)), 2, limit=1.0)
    assert (found.code, found.title[: len(title)], found.place) == (code, title, f"{tmp_path}/rewards.py{line}")
    assert found.notes == ("prompt: 17+1=",) and found.help


@pytest.mark.parametrize("body, code, title, line", [
    ("x = 1\nimport no_such_module\n", "RL0773", "ModuleNotFoundError", ":2"),
    ("def score(rows)\n    return 1\n", "RL0773", "SyntaxError", ":1"),
    ("x = 1\ny = x / 0\n", "RL0773", "ZeroDivisionError", ":2"),
    ("raise SystemExit('no')\n", "RL0773", "SystemExit: no", ":1"),
    ("def scores(rows):\n    return 1\n", "RL0774", "this file does not define a function `score`", ""),
    ("score = 3\n", "RL0774", "`score` is an int, not a function", ""),
    ("def score(prompts, completions, **columns):\n    return 1\n", "RL0774",
     "`score(prompts, completions, **columns)` does not take exactly one list of rows", ""),
    ("def score():\n    return 1\n", "RL0774", "`score()` does not take exactly one list of rows", ""),
])
@pytest.mark.parametrize("workers", [0, 2])
def test_files_are_checked_before_any_call(tmp_path: Path, workers: int, body: str, code: str, title: str,
                                           line: str) -> None:
    found = mistake(written(tmp_path, body), workers, rows=[])
    assert found.code == code and title in found.title and found.place == f"{tmp_path}/rewards.py{line}" and found.help


@pytest.mark.parametrize("takes, call", [
    ("data_source, solution_str, ground_truth, extra_info=None", 'f(data_source=row["data_source"], solution_str=row['
     '"completion"], ground_truth=row["reward_model"]["ground_truth"], extra_info=row.get("extra_info"))'),
    ("solution_str, ground_truth, method='strict'", 'f(solution_str=row["completion"], ground_truth=row["reward_model"]'
     '["ground_truth"])'),
    ("solution_str", 'f(solution_str=row["completion"])'),  # could be called with rows, as the next one
    ("completions, **columns", 'f(prompts=[r["prompt"] for r in rows], completions=[r["completion"] for r in rows])'),
    ("text, truth", "")])
def test_a_function_of_a_library_that_they_come_from(tmp_path: Path, takes: str, call: str) -> None:
    found = mistake(written(tmp_path, f"def score({takes}):\n    return 1\n"), rows=[])
    assert found.code == "RL0774" and found.help is not None
    assert found.help.endswith(f"`{call}`" if call else "a row is a dict")


@pytest.mark.parametrize("body, code, title, line", [
    ("import time\ntime.sleep(100)\n", "RL0777", "this Python file took more than 1 s to import", ":2"),
    ("import os\nos._exit(3)\n", "RL0778", "this Python file ended its process during import (exit status 3)",
     ""),
])
def test_files_that_hang_or_end_the_worker(tmp_path: Path, body: str, code: str, title: str, line: str) -> None:
    found = mistake(written(tmp_path, body), 2, loading=1.0, rows=[])
    assert (found.code, found.title, found.place) == (code, title, f"{tmp_path}/rewards.py{line}")


def test_a_file_that_changed(tmp_path: Path) -> None:
    function = written(tmp_path, "def score(rows):\n    return [0] * len(rows)\n")
    Path(function.path).write_text("def score(rows):\n    return [1] * len(rows)\n")
    assert mistake(function).code == "RL0772"


@pytest.mark.parametrize("path", ["std/nothing.py", "std/../std/rewards.py", "nothing.py"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_is_not_there(workers: int, path: str) -> None:
    assert mistake(Function("f", path, "score", ""), workers).code == "RL0771"


@pytest.mark.parametrize("result", ["[1.0]", "[1.0] * 1000", "3.0", "None", "'1' * len(rows)", "{}"])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_the_wrong_shape(tmp_path: Path, workers: int, result: str) -> None:
    found = mistake(written(tmp_path, f"def score(rows):\n    return {result}\n"), workers)
    assert found.code == "RL0776" and found.help


KINDS = {  # what a row does -> what is told of it
    "raise": ("raise ValueError(i)", "`score` raised: ValueError: {}"),
    "nan": ("return float('nan')", "`score` returned nan for row {0} (rows.jsonl:"),
    "hang": ("time.sleep(100)", "`score` took more than 0.5 s for row {0} (rows.jsonl:"),
    "die": ("os._exit(3)", "`score` ended its process on row {0} (rows.jsonl:"),
    "none": ("return None", "`score` returned None for row {0} (rows.jsonl:"),
}
SEVERAL = [
    {0: "hang", 2: "raise", 3: "hang"}, {1: "nan", 2: "raise"}, {1: "raise", 2: "nan", 0: "die"}, {3: "die", 4: "hang"},
    {7: "hang", 8: "die", 9: "raise"}, {2: "hang", 3: "nan", 5: "hang", 7: "raise"}, {5: "none", 6: "nan", 7: "raise"},
    {0: "raise", **{i: "hang" for i in range(1, 10)}},
]


@pytest.mark.thorough
@pytest.mark.parametrize("mistakes", SEVERAL, ids=range(len(SEVERAL)))
def test_of_several_mistakes_the_first_is_told(tmp_path: Path, mistakes: dict[int, str]) -> None:
    """For any number of workers."""
    does = "".join(f"    if i == {i}:\n        {KINDS[kind][0]}\n" for i, kind in mistakes.items())
    body = f"import os, time\ndef one(row):\n    i = int(row['completion'])\n{does}    return 0\n{EACH}"
    first = min(mistakes)
    for workers in (1, 2, 4):
        title = mistake(written(tmp_path, body), workers, limit=0.5, rows=ROWS[:10]).title
        assert title.startswith(KINDS[mistakes[first]][1].format(first)), (workers, title)


@pytest.mark.thorough
def test_rows_of_chunks_that_hang_together_are_judged_in_order(tmp_path: Path) -> None:
    """The second chunk is cut into rows after the first, and the first of its rows fails before others are loaded."""
    body = ("import time\ndef score(rows):\n    ids = {int(r['completion']) for r in rows}\n"
            "    if ids & {0, 3}:\n        time.sleep(100)\n    if 2 in ids:\n        raise ValueError(2)\n"
            "    return [0] * len(rows)\n")
    function = written(tmp_path, body)
    for workers in (1, 2, 3, 4):
        title = mistake(function, workers, limit=0.5, rows=ROWS[:16]).title
        assert title.startswith("`score` took more than 0.5 s for row 0 "), (workers, title)


@pytest.mark.thorough
def test_a_slow_function_is_called_row_by_row(tmp_path: Path) -> None:
    """No row takes too long, though rows together do."""
    body = "import time\ndef score(rows):\n    time.sleep(0.3 * len(rows))\n    return [len(rows)] * len(rows)\n"
    function = written(tmp_path, body)
    with RewardPool([function], 1, limit=0.7) as pool:
        assert pool.call(function, ROWS[:2]) == [2, 2]
        pool.limit = 0.5
        assert pool.call(function, ROWS[:4]) == [1, 1, 1, 1]
        assert pool.call(function, ROWS[:2]) == [1, 1]


@pytest.mark.parametrize("moment", ["between calls", "in a call"])
def test_a_worker_that_is_killed_once_is_replaced(tmp_path: Path, moment: str, capfd: pytest.CaptureFixture) -> None:
    body = ("import os\ndef one(row):\n    mark = os.path.join(os.path.dirname(__file__), 'mark')\n"
            "    if row['completion'] == '17' and os.path.exists(mark):\n        os.remove(mark)\n"
            "        os.kill(os.getpid(), 9)\n    return float(row['completion'])\n" + EACH)
    function = written(tmp_path, body)
    with RewardPool([function], 2) as pool:
        wanted = pool.call(function, ROWS)
        if moment == "in a call":
            (tmp_path / "mark").touch()
        else:
            for worker in pool.workers:
                os.kill(worker.process.pid, signal.SIGKILL)
            gone([w.process.pid for w in pool.workers])
        assert pool.call(function, ROWS) == wanted == [float(i) for i in range(40)]
    said = "ended this process (killed by SIGKILL); retrying its rows one by one" in capfd.readouterr().err
    assert said == (moment == "in a call")


def test_nothing_is_left_after_the_end_or_a_mistake(tmp_path: Path) -> None:
    """Workers, and what they have started themselves."""
    (tmp_path / "pids").mkdir()
    body = ("import os, subprocess\ndef note(pid):\n    open(f'{os.path.dirname(__file__)}/pids/{pid}', 'w').close()\n"
            "note(os.getpid())\ndef score(rows):\n    note(subprocess.Popen(['sleep', '100']).pid)\n"
            "    return [int(r['answer']) for r in rows]\n")
    function = written(tmp_path, body)
    with RewardPool([function], 2) as pool:
        pool.call(function, ROWS)
        before = noted(tmp_path / "pids")
        assert len(before) > 2 and all(map(lives, before))
    assert gone(before)
    assert mistake(function, 2, rows=[{"answer": "x"}] * 4).code == "RL0775"
    after = noted(tmp_path / "pids")
    assert len(after) > len(before) and gone(after)


@pytest.mark.parametrize("busy", [False, True])
def test_workers_end_with_a_rank_that_is_killed(tmp_path: Path, busy: bool) -> None:
    """Even one that is in the middle of an endless function, and holds Python's lock."""
    (tmp_path / "pids").mkdir()
    body = ("import os, re\nopen(f'{os.path.dirname(__file__)}/pids/{os.getpid()}', 'w').close()\n"
            "def score(rows):\n    open(f'{os.path.dirname(__file__)}/busy', 'w').close()\n"
            "    re.match('(a+)+b', 'a' * 60)\n")
    function = written(tmp_path, body)
    program = ("import sys, time\nfrom rldsl.plan.model import Function\n"
               "from rldsl.runtime.rewards.pool import RewardPool\n"
               f"f = Function(*{(function.id, function.path, function.name, function.sha256)!r})\n"
               "pool = RewardPool([f], 2)\n"
               "print('ready', flush=True)\n" + ("pool.call(f, [{}] * 4)\n" if busy else "") + "time.sleep(100)\n")
    rank = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert rank.stdout is not None and rank.stdout.readline() == b"ready\n"
    while busy and not (tmp_path / "busy").exists():
        time.sleep(0.02)
    workers = noted(tmp_path / "pids")
    assert len(workers) == 2 and all(map(lives, workers))
    rank.kill()
    rank.wait()
    rank.stdout.close()
    assert gone(workers)


def test_signals_of_the_terminal_are_for_the_rank(tmp_path: Path) -> None:
    body = "import os\ndef score(rows):\n    return [float(os.getpgid(0) == os.getpid()) for _ in rows]\n"
    function = written(tmp_path, body)
    with RewardPool([function], 1) as pool:
        assert set(pool.call(function, ROWS)) == {1.0}


def test_workers_that_never_live_long_end_the_run(tmp_path: Path) -> None:
    body = ("import os, threading, time\ndef end():\n    time.sleep(0.05)\n    os._exit(4)\n"
            "threading.Thread(target=end, daemon=True).start()\n"
            "def score(rows):\n    time.sleep(1)\n    return [0] * len(rows)\n")
    found = mistake(written(tmp_path, body), 1)
    assert (found.code, found.title[-15:]) == ("RL0778", "(exit status 4)") or "loading" in found.title
