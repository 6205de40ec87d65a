"""Calls on disjoint meshes run at the same time: shown from what the ranks recorded, not from what the plan says."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from tests.end_to_end.programs import run_program
from tests.samples import thorough_between
from tests.tiny import make_all

PPO = Path(__file__).parents[2] / "examples" / "ppo.rlf"
Spans = dict[tuple[str, int], list[dict]]  # (name of the call, step) -> what each of its ranks recorded


@pytest.fixture(scope="module")
def timeline(tmp_path_factory: pytest.TempPathFactory) -> Spans:
    """ppo.rlf as it stands, on the placement of ReaL's authors; only sizes are small."""
    tiny = make_all(tmp_path_factory.mktemp("tiny"))
    sets = {"base": str(tiny / "models/sft"), "rm": str(tiny / "models/rm"), "rows": str(tiny / "data/prompts.jsonl"),
            "steps": 3, "batch": 16, "tokens": 8}
    folder = tmp_path_factory.mktemp("run")
    run_program(PPO, sets, folder, trace=folder / "trace.json")
    found: Spans = defaultdict(list)
    for span in json.loads((folder / "trace.json").read_text())["traceEvents"]:
        if span["ph"] == "X":
            found[span["name"], span["args"]["step"]].append(span)
    return found


def overlap(timeline: Spans, a: str, b: str, step: int) -> bool:
    """Whether some rank of `a` and some rank of `b` are inside their calls at one moment."""
    return any(x["ts"] < y["ts"] + y["dur"] and y["ts"] < x["ts"] + x["dur"]
               for x in timeline[a, step] for y in timeline[b, step])


@pytest.mark.parametrize("a, b", thorough_between([("judge.score", "ref.logprobs"), ("ref.logprobs", "critic.values"),
                                  ("judge.score", "critic.values"), ("actor.train", "critic.train")]))
def test_calls_on_disjoint_meshes_overlap(timeline: Spans, a: str, b: str) -> None:
    for step in (1, 2, 3):
        mine, theirs = ({span["tid"] for span in timeline[name, step]} for name in (a, b))
        assert mine and theirs and not mine & theirs
    assert any(overlap(timeline, a, b, step) for step in (2, 3))


@pytest.mark.parametrize("a, b", [("actor.generate", "judge.score"), ("judge.score", "critic.train")])
def test_a_call_ends_before_what_needs_it_ends(timeline: Spans, a: str, b: str) -> None:
    for step in (1, 2, 3):
        assert max(s["ts"] + s["dur"] for s in timeline[a, step]) <= max(s["ts"] + s["dur"] for s in timeline[b, step])
