"""Plan files as a disk or a transfer may damage them: every reader of a plan says a code, and none takes one for another.
"""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest
from click.testing import CliRunner

from rldsl.cli import main
from rldsl.diag import Failure
from rldsl.plan.codec import encode
from rldsl.runtime.plan_file import PlanFile
from tests.plan.sample import grpo

GOOD = encode(grpo())
READERS = {"verify": [], "show": [], "emit": ["--rank", "0"], "report": ["-o", "r.html"], "sim": ["--cluster", "h100x8"],
           "run": ["--out", "out"], "diff": ["good.plan"]}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("good.plan").write_bytes(GOOD)


def codes(path: str, *readers: str) -> set[str]:
    """What the commands say of a file, and the loader of the ranks."""
    found = set()
    for name in readers:
        done = CliRunner().invoke(main, [name, path, *READERS[name]])
        assert done.exit_code == 2 if name == "diff" else done.exit_code == 1, (name, done.output)
        assert done.output.startswith("error[RL0") and "Traceback" not in done.output, (name, done.output)
        found.add(done.output[6:12])
    with pytest.raises(Failure) as failure:
        PlanFile.read(path)
    return found | {failure.value.diagnostics[0].code}


def test_any_changed_byte_is_damage() -> None:
    random_ = random.Random(1)
    for i in range(200):
        data = bytearray(GOOD)
        at = random_.randrange(len(data))
        data[at] = (data[at] + random_.randrange(1, 256)) % 256
        Path("x.plan").write_bytes(data)
        assert codes("x.plan", "verify" if i % 2 else "show") <= {"RL0601", "RL0602"}, at


FILES = {"empty": b"", "a line": b"\n", "zeros": bytes(500), "half": GOOD[: len(GOOD) // 2], "no digest": GOOD[:-90],
         "no end": GOOD[:-1], "twice": GOOD * 2, "more": GOOD + b"x", "CRLF": GOOD.replace(b"\n", b"\r\n"),
         "BOM": b"\xef\xbb\xbf" + GOOD, "gzip": gzip.compress(GOOD)}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_cut_or_changed_as_a_whole(name: str) -> None:
    Path("x.plan").write_bytes(FILES[name])
    [code] = codes("x.plan", *READERS)
    assert code == ("RL0602" if GOOD[:100] == FILES[name][:100] or name == "CRLF" else "RL0601")


def test_an_empty_file_is_called_empty() -> None:
    Path("x.plan").write_bytes(b"")
    assert "the file is empty" in CliRunner().invoke(main, ["verify", "x.plan"]).output


def test_what_is_no_file() -> None:
    Path("x.plan").mkdir()
    Path("loop.plan").symlink_to("loop.plan")
    for path in ("x.plan", "loop.plan", "y" * 300 + ".plan"):
        of_runs = {"RL0783"} if path == "x.plan" else set()  # `rlc report` takes a directory for one of a run
        assert codes(path, *READERS) == {"RL0092", "RL0700"} | of_runs
    assert codes("none.plan", *READERS) == {"RL0091", "RL0700"}
