"""What medians and quantiles over the batch gather: the estimate against the storages that live."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rldsl import api
from rldsl.memory import curves
from rldsl.memory.curve import during
from rldsl.memory.values import Tables, flow_gather_bytes, loss_gather_bytes
from rldsl.plan.expr import Program
from rldsl.plan.model import Layout, Spread
from rldsl.plan.projection import event_paths
from rldsl.runtime.interpreter.expression_programs import run_compute
from rldsl.runtime.interpreter.minibatch_loss import MinibatchLoss, loss_counts
from rldsl.runtime.interpreter.ragged_index import FrameRows
from rldsl.runtime.interpreter.train_event import minibatch_metrics
from tests.frames import frame
from tests.memory.accounting import Storages
from tests.runtime.builder import Builder
from tests.tiny import make_model, write_jsonl

ROWS, TOKENS, PART = 512, 64, 16
FRAME = frame("gen", "R", "P", ROWS, 4, response_tokens=TOKENS)
TABLES = Tables({"gen": FRAME}, {}, {}, {})
INPUT = torch.randn(ROWS * TOKENS, generator=torch.Generator().manual_seed(1))


def loss() -> Program:
    b = Builder()
    lp = b.input("lp", "token")
    return b.program(loss=b.to("mean", lp, "batch"), middle=b.to("median", lp, "batch"),
                     top=b.put("quantile", (b.to("sum", lp, "seq"), b.put("const", value=0.9)), to="batch"))


def flow() -> Program:
    b = Builder()
    return b.program(middle=b.to("median", b.input("lp", "token"), "batch"))


def view(rows: range) -> FrameRows:
    own = torch.tensor(rows)
    return FrameRows(own, own // 4, torch.full((len(rows),), TOKENS))


@pytest.mark.parametrize(("minibatches", "epochs"), [(1, 1), (4, 1), (2, 3)])
def test_a_loss_holds_what_the_estimate_says(minibatches: int, epochs: int) -> None:
    size, losses = ROWS // minibatches, []
    said = loss_gather_bytes(TABLES, loss(), Spread("s", "m", frames=("gen",), minibatches=minibatches, epochs=epochs))
    views = {r: view(range(r, r + PART)) for r in range(0, ROWS, PART)}
    with Storages() as storages:
        storages.see(INPUT.untyped_storage())
        for _ in range(epochs):
            for first in range(0, ROWS, size):
                losses.append(MinibatchLoss(loss(), loss_counts(loss(), {"gen": FRAME}, range(first, first + size),
                                                                {"gen": [TOKENS] * ROWS})))
                for r in range(first, first + size, PART):
                    losses[-1]({"lp": INPUT[r * TOKENS : (r + PART) * TOKENS]}, {"gen": views[r]})
        minibatch_metrics(losses, True, None, torch.device("cpu"))
    words = 3 * len(losses) * losses[0].num_words * 8  # of exact sums: a few hundred bytes, which the estimate leaves out
    assert 0.75 * said < storages.most - INPUT.nbytes <= said + words


def test_a_computation_holds_what_the_estimate_says() -> None:
    rows = {"gen": view(range(ROWS))}
    with Storages() as storages:
        storages.see(INPUT.untyped_storage())
        run_compute(flow(), {"lp": INPUT}, rows, {"gen": FRAME}, None, lambda _: INPUT)
    said = flow_gather_bytes(TABLES, flow(), Spread("s", "m", frames=("gen",)))
    assert 0.6 * said < storages.most - INPUT.nbytes <= said


def test_a_rank_has_its_share_of_the_rows_and_all_elements() -> None:
    tables = Tables({"gen": FRAME}, {}, {}, {"l": Layout("l", "m", dp=8)})
    spread = Spread("s", "m", "l", ("gen",))
    elements = ROWS * TOKENS
    assert flow_gather_bytes(tables, flow(), spread) == 8 * (elements // 8 + 3 * elements)
    assert loss_gather_bytes(tables, flow(), spread) == 8 * (2 * (elements // 8 + elements) + 3 * elements)


PROGRAM = """
use std.grpo (group_norm, grpo_free)
data prompts = jsonl("prompts.jsonl", batch=8, max_prompt_tokens=16)
model actor = causal_lm("m") train adamw(lr=1e-4)
loss mine(logprobs: token; old: token) {{
  metric middle = {metric}
  return mean(exp(logprobs - old))
}}
flow run(steps=2) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=2, max_new_tokens=32)
  actor.train(gen, loss=mine(old=gen.logprobs))
  metric spread = {logged}
}}
"""


@pytest.mark.parametrize(("metric", "logged", "names"), [
    ("median(logprobs)", "mean(len(gen))", {"medians and quantiles of actor.train": 8 * (4 + 3) * 16 * 32}),
    ("mean(logprobs)", "quantile(len(gen), 0.9)", {"medians and quantiles of metric spread": 8 * (1 + 3) * 16}),
    ("mean(median(logprobs by seq))", "mean(median(len(gen) by prompt))", {}),
])
def test_the_curve_has_them(metric: str, logged: str, names: dict[str, int], tmp_path: Path,
                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "m")
    write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "1"}] * 8)
    (tmp_path / "p.rlf").write_text(PROGRAM.format(metric=metric, logged=logged))
    plan = api.compile("p.rlf")
    [curve] = curves(plan)
    found = {what: size for e, _ in event_paths(plan) for what, size in during(curve, e.id) if "median" in what}
    assert len(found) == len(names)
    for (what, size), (name, want) in zip(found.items(), names.items(), strict=True):
        assert what.startswith(name) and size == want
