"""`rlc postmortem` on folders made by hand, whole and broken."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rldsl.cli import main
from rldsl.diag import Failure
from rldsl.plan.codec import encode, plan_id
from rldsl.postmortem.dumps import (
    EventRun,
    Heartbeat,
    LastHeartbeats,
    RankDump,
    RankPosition,
    RingEntry,
    dump_text,
    heartbeat_text,
    read_dump,
    read_heartbeat,
    read_last_heartbeats,
)
from rldsl.runtime.health.dump_files import remove_dumps, write_dump
from tests.postmortem.hand import DATA, LENGTHS, PLAN, TURN, at, dump, sign

SIGNS = LastHeartbeats(plan_id(DATA), "s", 0, 1000.0, ((4, sign(4, at(TURN, 2, 3), process="stopped")),))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "run.plan").write_bytes(DATA)
    for rank in (0, 1, 2, 3, 5, 6, 7):
        write_dump(tmp_path, dump(rank, at(LENGTHS, 3), reason="rank 4 is suspended"))
    write_dump(tmp_path, SIGNS)
    return tmp_path


def told(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["postmortem", *map(str, arguments)])


def refused(code: str, *arguments: object) -> str:
    done = told(*arguments)
    assert done.exit_code == 1 and f"error[{code}]" in done.output and "Traceback" not in done.output, done.output
    return done.output


def test_the_run_or_its_folder(out: Path) -> None:
    text = told(out).output
    assert told(out / "postmortem").output == text
    assert text == """p.rlf, flow f, 8 ranks

rank 4 is suspended: its process exists but does not run

ranks 0-3,5-7 wait for rank 4 in event 2 (lengths gen.lengths, p.rlf:6:3, because the rows of gen are divided by \
length) of step 3: it was last seen in event 7 (judge.values, p.rlf:10:5) of step 2, iteration 3, 40 s before the others; its \
process is suspended

where each rank is, the furthest behind first
  rank 4 was last seen in event 7 (judge.values, p.rlf:10:5) of step 2, iteration 3, 40 s before the others; its process is \
suspended
  ranks 0-3,5-7 are in event 2 (lengths gen.lengths, p.rlf:6:3) of step 3, in all_reduce for 41 s
"""


def test_for_programs(out: Path) -> None:
    found = json.loads(told(out, "--json").output)
    assert found["title"].startswith("rank 4 is suspended") and found["culprits"] == [{"rank": 4, "why": "stopped"}]
    assert found["waits"] == [{"ranks": [0, 1, 2, 3, 5, 6, 7], "on": [4], "kind": "not reached", "at": {
        "event": LENGTHS, "turns": [3], "call": "lengths gen.lengths", "at": "p.rlf:6:3",
        "because": "the rows of gen are divided by length"}}]
    assert [r["rank"] for r in found["ranks"]] == list(range(8))
    assert found["ranks"][4]["position"]["at"]["turns"] == [2, 3]


def test_a_plan_elsewhere(out: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("elsewhere") / "p.plan"
    (out / "run.plan").rename(other)
    refused("RL0797", out)
    assert told(out, "--plan", other).exit_code == 0
    refused("RL0797", out, "--plan", other.parent)
    (out / "run.plan").write_bytes(encode(replace(PLAN, header=replace(PLAN.header, seed=2))))
    assert "run.plan is plan" in refused("RL0797", out)


def test_without_signs_the_dumps_are_enough(out: Path) -> None:
    (out / "postmortem/signs.json").unlink()
    assert "rank 4 has no heartbeat" in told(out).output


def test_nothing_there(tmp_path: Path) -> None:
    refused("RL0795", tmp_path / "no")
    refused("RL0795", tmp_path)
    (tmp_path / "postmortem").mkdir()
    assert "no dumps" in refused("RL0795", tmp_path)
    write_dump(tmp_path, SIGNS)
    refused("RL0795", tmp_path)


@pytest.mark.parametrize("change, what", [({"plan": "0" * 12}, "plan"), ({"start": "t"}, "start"),
                                          ({"world": 4}, "world")])
def test_dumps_that_do_not_belong_together(out: Path, change: dict[str, object], what: str) -> None:
    write_dump(out, replace(dump(1, at(LENGTHS, 3)), **change))
    text = refused("RL0796", out)
    assert f"not from the same {what}" in text and "rank-1.json" in text and "rank-0.json, rank-2.json" in text


def test_signs_of_another_start(out: Path) -> None:
    write_dump(out, replace(SIGNS, start="t"))
    assert "signs.json" in refused("RL0796", out)


WHOLE = dump_text(dump(1, at(LENGTHS, 3)))


@pytest.mark.parametrize("text", [
    "", WHOLE[:-20], "[1]", "{}", "null", "\xff", WHOLE.replace('"format":2', '"format":1'),
    WHOLE.replace('"rank":1', '"rank":"1"'), WHOLE.replace('"rank":1', '"rank":true'),
    WHOLE.replace('"rank":1', '"rank":2'),
    WHOLE.replace('"rank":1', '"rank":-1'), WHOLE.replace('"rank":1', '"rank":9'), WHOLE.replace('"pid":101,', ""),
    WHOLE.replace('"pid":101', '"pid":101,"more":0'), WHOLE.replace('"begins"', '"sleeps"'),
    WHOLE.replace('"turns":[3]', '"turns":[3.5]'), WHOLE.replace('"turns":[3]', '"turns":3'),
    WHOLE.replace('"event":2', '"event":77'), WHOLE.replace('"event":2', '"event":null'),
    WHOLE.replace('"ring":[', '"ring":[7,'), WHOLE.replace('"seconds":41.0', '"seconds":"long"'),
    WHOLE.replace('"world":8', '"world":9'), "[" * 100000])
def test_a_broken_dump(out: Path, text: str) -> None:
    assert text != WHOLE
    (out / "postmortem/rank-1.json").write_text(text, encoding="latin-1")
    if '"world":9' in text:
        refused("RL0796", out)
    else:
        assert "rank-1.json" in refused("RL0794", out)


@pytest.mark.parametrize("text", ["", "{}", *(dump_text(SIGNS).replace(*change) for change in (
    ("[4,", "[4.5,"), ("[4,", "[4,4,"), ("[4,", "[8,"), ('"stopped"', '"asleep"'), ('"event":7', '"event":77')))])
def test_broken_signs(out: Path, text: str) -> None:
    (out / "postmortem/signs.json").write_text(text)
    assert "signs.json" in refused("RL0794", out)


def test_a_dump_that_cannot_be_read(out: Path) -> None:
    (out / "postmortem/rank-1.json").unlink()
    (out / "postmortem/rank-1.json").mkdir()
    refused("RL0794", out)


def test_a_plan_that_is_damaged(out: Path) -> None:
    """Its bytes are not those that the dumps name."""
    (out / "run.plan").write_bytes(DATA[:-10])
    refused("RL0797", out)


# ---------------------------------------------------------------------------------------------------- the files


def test_what_is_written_is_read() -> None:
    position = RankPosition(EventRun(3, (1, 2)), "waits", 0.25, EventRun(2, (1,)), "", "wait")
    whole = dump(3, position, first=True, code="RL0709", reason="über", stack=("a.py:1 f",), late=True,
                 ring=(RingEntry(1.5, None, "start-up"), RingEntry(0.5, EventRun(3, (1, 2)), "calls", None, "judge")))
    assert read_dump(dump_text(whole), "x") == whole
    assert read_last_heartbeats(dump_text(SIGNS), "x") == SIGNS
    for one in (sign(0, RankPosition()), sign(1, position, process="gone")):
        assert read_heartbeat(heartbeat_text(one)) == one
    with pytest.raises(Failure):
        read_heartbeat('{"beat": 1}')


def test_a_dump_is_whole_or_not_there(tmp_path: Path) -> None:
    write_dump(tmp_path, dump(0, RankPosition(), reason="a"))
    write_dump(tmp_path, dump(0, RankPosition(), reason="b"))
    assert [p.name for p in (tmp_path / "postmortem").iterdir()] == ["rank-0.json"]
    assert read_dump((tmp_path / "postmortem/rank-0.json").read_text(), "x").reason == "b"
    remove_dumps(tmp_path)
    remove_dumps(tmp_path)
    assert not (tmp_path / "postmortem").exists()


def test_what_the_disk_refuses_keeps_nobody_from_ending(tmp_path: Path) -> None:
    (tmp_path / "postmortem").write_text("a file")
    write_dump(tmp_path, dump(0, RankPosition()))
    write_dump(tmp_path / "postmortem", dump(0, RankPosition()))
    remove_dumps(tmp_path)


def test_dumps_are_small() -> None:
    ring = tuple(RingEntry(12.345, EventRun(1000, (100000, 20)), "resumes") for _ in range(128))
    one: RankDump = dump(1000, at(LENGTHS, 3), ring=ring, stack=("/a/long/path/of/a/file.py:1000 function",) * 24)
    assert len(dump_text(one)) < 16_000
    held: Heartbeat = sign(1000, at(LENGTHS, 100000))
    assert len(heartbeat_text(held)) < 400  # twice a second, from every rank
