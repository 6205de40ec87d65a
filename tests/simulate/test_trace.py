"""Recorded and simulated timelines: valid, and of one form, so that both open side by side."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from rldsl import api
from rldsl.clusters import preset
from rldsl.plan.model import Plan
from rldsl.simulate import simulate
from rldsl.simulate.trace import MAX_LINES, chrome
from tests.end_to_end.programs import run_program
from tests.simulate import plans
from tests.tiny import make_model, make_sums, write_jsonl

PROGRAM = """use std.grpo (group_norm, grpo)
cluster nodes=2 gpus=1
data prompts = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=8)
model actor = causal_lm("models/sft") train adamw(lr=1e-5)
model ref   = causal_lm("models/sft")
flow grpo(steps=2, seed=1) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=2, max_new_tokens=4)                         on mesh(0:2, 0:1) dp=2
  ref_lp = ref.logprobs(gen)                                                     on mesh(1:2, 0:1)
  long   = len(gen) - ref_lp
  adv    = group_norm(mean(long by seq))
  actor.train(gen, loss=grpo(old=gen.logprobs, adv=adv, ref=ref_lp, beta=0.1))   on mesh(0:2, 0:1) pp=2
}
"""
SPAN = {"name": str, "cat": str, "ph": str, "pid": int, "tid": int, "ts": (int, float), "dur": (int, float),
        "args": dict}
ARGS = {"event": int, "at": str, "line": str, "step": int, "because": str, "busy": (int, float)}
RECORDED = {"waited": (int, float)}  # what only a run knows


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, dict, dict]:
    folder = tmp_path_factory.mktemp("trace")
    make_model(folder / "models/sft")
    write_jsonl(folder / "data/prompts.jsonl", make_sums(16))
    (folder / "grpo.rlf").write_text(PROGRAM)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_program(Path("grpo.rlf"), {}, folder / "run", trace=folder / "trace.json")
        plan = api.compile("grpo.rlf")
    recorded = json.loads((folder / "trace.json").read_text())
    return plan, recorded, json.loads(chrome(plan, simulate(plan, preset("h100x64"))))


def spans(trace: dict) -> list[dict]:
    return [e for e in trace["traceEvents"] if e["ph"] == "X"]


def check(trace: dict, per_node: int) -> None:
    """What Perfetto needs, and what we promise besides."""
    assert trace["displayTimeUnit"] == "ms" and {"program", "flow", "world", "what"} <= set(trace["otherData"])
    labels = {(e["name"], e["pid"], e["tid"]) for e in trace["traceEvents"] if e["ph"] == "M"}
    by: dict[int, list[dict]] = defaultdict(list)
    for span in spans(trace):
        assert set(span) == set(SPAN) and all(isinstance(span[k], t) for k, t in SPAN.items())
        args = ARGS | (RECORDED if trace["otherData"]["what"] == "recorded" else {})
        assert set(span["args"]) == set(args) and all(isinstance(span["args"][k], t) for k, t in args.items())
        assert span["dur"] >= 0 and span["ts"] >= 0
        assert span["pid"] == span["tid"] // per_node
        assert ("process_name", span["pid"], 0) in labels and ("thread_name", span["pid"], span["tid"]) in labels
        by[span["tid"]].append(span)
    for mine in by.values():  # a rank does one thing after the other
        mine.sort(key=lambda s: s["ts"])
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1.0 for a, b in zip(mine, mine[1:]))
    assert len(json.dumps(trace)) > 0 and min(s["ts"] for s in spans(trace)) == 0


def test_both_are_valid(traces: tuple[Plan, dict, dict]) -> None:
    plan, recorded, simulated = traces
    check(recorded, plan.header.devices_per_node)
    check(simulated, plan.header.devices_per_node)
    assert (recorded["otherData"]["what"], simulated["otherData"]["what"]) == ("recorded", "simulated")


def test_both_say_the_same_of_a_step(traces: tuple[Plan, dict, dict]) -> None:
    """The same events on the same ranks, under the same names, in the same order, for the same lines and reasons."""
    _, recorded, simulated = traces

    def told(trace: dict, step: int) -> dict[tuple, list[tuple]]:
        found: dict[tuple, list[tuple]] = defaultdict(list)
        for s in sorted(spans(trace), key=lambda s: s["ts"]):
            if s["args"]["step"] == step:
                args = (s["args"][k] for k in ("event", "at", "line", "because"))
                found[s["pid"], s["tid"]].append((s["name"], s["cat"], *args))
        return found

    assert told(recorded, 2) == told(simulated, 1) and len(told(recorded, 2)) == 2


def test_the_recorded_one_has_every_rank_and_step(traces: tuple[Plan, dict, dict]) -> None:
    _, recorded, _ = traces
    assert {(s["tid"], s["args"]["step"]) for s in spans(recorded)} >= {(r, n) for r in (0, 1) for n in (0, 1, 2)}
    names = {e["args"]["name"] for e in recorded["traceEvents"] if e["ph"] == "M" and "name" in e["args"]}
    assert names == {"node 0 recorded", "node 1 recorded", "rank 0", "rank 1"}


def test_busy_is_the_processor_s_time(traces: tuple[Plan, dict, dict]) -> None:
    _, recorded, simulated = traces
    assert all(s["args"]["busy"] * 1e6 <= s["dur"] + 1.0 for s in spans(simulated))
    assert sum(s["args"]["busy"] for s in spans(recorded)) > 0


def test_many_ranks_share_lines() -> None:
    plan = plans.scaled(plans.plan("tensors"), 100)
    assert plan.header.world > MAX_LINES
    found = json.loads(chrome(plan, simulate(plan, preset("h100x800"))))
    check(found, plan.header.devices_per_node)
    names = [e["args"]["name"] for e in found["traceEvents"] if e["name"] == "thread_name"]
    assert len(names) < 20 and any(n.startswith("ranks 0-") for n in names)
