"""A loss is one that micro-batches and ranks can add up exactly, or one with a pass before that sees all of them.

In: tables with sound references. Out: diagnostics RL0618. Rules: all elements are of the frames that are trained on,
and an output of the model is in the loss. Without a first pass, the loss is a sum of reductions over the batch, each
with a factor that does not depend on the rows; such a reduction is used for no single element; and nothing is reduced
by prompt. With one, what is reduced by prompt has whole prompts in its minibatches, and arithmetic over a vocabulary
depends on nothing that is known only after that pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rldsl.diag import Diagnostic
from rldsl.plan.events import Train
from rldsl.plan.expr import Node, Program, nodes_under
from rldsl.plan.operators import OPERATORS, in_family
from rldsl.verify.row_division import beyond_rows
from rldsl.verify.tables import Tables, name, problem


def check_losses(t: Tables) -> Iterator[Diagnostic]:
    for e, _ in t.events:
        if isinstance(e, Train) and (fault := _fault(t, e, t.programs[e.loss])):
            yield problem("RL0618", f"{name(e)}: program {e.loss} {fault}", e)


def _fault(t: Tables, e: Train, program: Program) -> str:
    nodes, outputs = program.nodes, dict(program.outputs)
    malformed = any(n.op not in OPERATORS or len(n.args) != OPERATORS[n.op].arity or not all(0 <= a < i for a in n.args)
                    for i, n in enumerate(nodes))
    if malformed or not 0 <= outputs.get("loss", -1) < len(nodes):
        return ""  # another check's
    frames = [t.frames[f] for f in e.frames]
    spaces = {"", *(x for f in frames for x in (f.id, f.row_space, f.prompt_space)),
              *(x for x, of in t.entries.items() if of.frame in e.frames)}
    if strange := next((n.space for n in nodes if n.space not in spaces), None):
        return f"uses {strange}, which is not a training input"
    by_prompt = any(in_family(n.op, "rows") or in_family(n.op, "reduction", "order") and beyond_rows(t, nodes, n)
                    for n in nodes)
    if not e.first_pass and any(in_family(n.op, "order", "rows") for n in nodes):
        return "orders elements, but a micro-batch has only some of them"
    if by_prompt and (not e.first_pass or t.spreads[e.spread].granularity != "prompt"):
        return "reduces by prompt, but a micro-batch or minibatch may contain only part of a prompt's sequences"
    if e.first_pass:
        used = {nodes[i].attr("name") for i in nodes_under(nodes, [outputs["loss"]]) if nodes[i].op == "input"}
        return _within_tokens(t, e, nodes) or (
            "" if used & {n for n, _, _ in e.model_outputs} else "has a loss that does not depend on the model")
    inner = nodes_under(nodes, [a for n in nodes if _reduces(n) for a in n.args[:1]])
    if any(_reduces(nodes[i]) for i in inner):
        return "uses a reduction over the batch elementwise"
    return _affine(nodes, outputs["loss"], {n for n, _, _ in e.model_outputs})


def _within_tokens(t: Tables, e: Train, nodes: Sequence[Node]) -> str:
    """What is wrong with the arithmetic over a whole vocabulary, which is done in the passes themselves; or ""."""
    whole = [i for i, n in enumerate(nodes) if n.level == "entry" and n.space in t.entries
             and not t.entries[n.space].width]
    below = [nodes[i] for i in nodes_under(nodes, whole)]
    seen = any(in_family(n.op, "order", "rows") or in_family(n.op, "reduction")
               and (n.attr("to") == "batch" or beyond_rows(t, nodes, n)) for n in below)
    return "computes over the vocabulary with what only the whole minibatch says" if seen else ""


def _reduces(n: Node) -> bool:
    return in_family(n.op, "reduction") and n.attr("to") == "batch"


def _affine(nodes: Sequence[Node], loss: int, model_outputs: set[str]) -> str:
    """What is wrong with the loss, or "": walk down from it through sums and constant factors to reductions."""
    of_rows = [False] * len(nodes)  # at batch level: whether a reduction is in it
    for i, n in enumerate(nodes):
        of_rows[i] = n.level == "batch" and (_reduces(n) or any(of_rows[a] for a in n.args))
    terms, waiting = [], [loss]
    while waiting:
        i = waiting.pop()
        n = nodes[i]
        if not of_rows[i]:
            continue
        if _reduces(n):
            if OPERATORS[n.op].combine != "sum":
                return f"is not a sum of reductions: it contains {n.op}"
            terms.append(i)
            continue
        rows = [of_rows[a] for a in n.args]
        linear = (n.op in ("add", "sub", "neg", "stop_gradient") or n.op == "mul" and sum(rows) == 1
                  or n.op == "div" and not rows[1] or n.op == "where" and not rows[0])
        if not linear:
            return f"is not a sum of reductions: it applies {n.op} to them"
        waiting += n.args
    used = {nodes[i].attr("name") for i in nodes_under(nodes, terms) if nodes[i].op == "input"}
    return "" if used & model_outputs else "has a loss that does not depend on the model"
