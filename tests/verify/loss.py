"""What a loss must be, so that micro-batches and ranks may each add their share. In: the program of a train event and
its frames. Out: the metrics that training has, or `Garbage`."""

from __future__ import annotations

from collections.abc import Mapping

from rldsl.plan.events import Train
from rldsl.plan.expr import Program
from rldsl.plan.spaces import IndexedFrame
from tests.verify.arithmetic import REDUCTIONS, need


def check_loss(program: Program, kind: str, e: Train, frames: Mapping[str, IndexedFrame]) -> set[str]:
    nodes, outputs = program.nodes, dict(program.outputs)
    spaces = {("batch", "")}
    for f in frames.values():
        spaces |= {("token", f.id), ("seq", f.row_space), ("prompt", f.prompt_space)}
    need(frames and len({f.row_space for f in frames.values()}) == 1, "a loss over several sets of rows")
    need("loss" in outputs and all(nodes[i].level == "batch" for i in outputs.values()), "a loss that is no number")
    need(all((n.level, n.space) in spaces for n in nodes), "rows that are not trained on")
    need(not any(n.op in ("py", "uniform", "step") for n in nodes), "what no micro-batch can add up")
    need(not any(n.level == "prompt" and n.attr("to") for n in nodes), "a prompt of which a minibatch may hold a part")
    given = {n for n, _, _ in e.model_outputs} | {n for n, _ in e.data_inputs}
    need(given == {str(n.attr("name")) for n in nodes if n.op == "input"}, "inputs that the loss does not take")
    heads = {"causal_lm": ("logprobs", "entropy", "sum_squares"), "value_model": ("values", "end_values"), "reward_model": ("scores",)}
    need(all(f in frames and what in heads[kind] for _, f, what in e.model_outputs), "an output that the model does not have")
    reduces = [(n.op in REDUCTIONS or n.op == "quantile") and n.level == "batch" for n in nodes]
    inner: set[int] = set()
    waiting = [a for i, n in enumerate(nodes) if reduces[i] for a in n.args[:1]]
    while waiting:
        inner.add(i := waiting.pop())
        waiting += nodes[i].args
    need(not any(reduces[i] for i in inner), "a reduction over the batch, used for each element")
    _affine(program, outputs["loss"], reduces)
    return set(outputs) - {"stop"} | {"grad_norm", "lr"} | ({"updates"} if "stop" in outputs else set()) | (
        {"skipped"} if e.nonfinite == "skip" else set())


def _affine(program: Program, root: int, reduces: list[bool]) -> None:
    """The loss is a sum of reductions with factors that do not depend on the rows."""
    free: dict[int, bool] = {}  # whether a batch-level node holds no reduction
    for i, n in enumerate(program.nodes[: root + 1]):
        free[i] = not reduces[i] and all(free[a] for a in n.args)
        if n.level != "batch":
            free[i] = False
    waiting = [root]
    while waiting:
        i = waiting.pop()
        n = program.nodes[i]
        if free[i] or reduces[i]:
            need(n.op not in ("amax", "amin", "median", "quantile") or not reduces[i], "a loss that is one of its elements")
            continue
        if n.op in ("mul", "div"):
            need(free[n.args[1]] or n.op == "mul" and free[n.args[0]], "a loss that multiplies means")
        elif n.op == "where":
            need(free[n.args[0]], "a loss that asks about its own rows")
        else:
            need(n.op in ("add", "sub", "neg", "stop_gradient"), f"a loss in which no shares add up: {n.op}")
        waiting += [a for a in n.args if not free[a]]
