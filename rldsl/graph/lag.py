"""`lag=k`: which nodes run k steps ahead, and which others may.

In: the items of a flow. Out: the ids of its generates, and of all that they are made from within a step; or errors. In
iteration i of the run these nodes work for step i + k, on the parameters, states and buffers as they are at their place
in iteration i; all others work for step i. Those of the others that depend on nothing that lasts, such as rewards and
the log-probs of a frozen model, may run earlier: it changes no number, and where they run decides
(`passes/run_ahead.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from rldsl.diag import counted
from rldsl.graph import model as g
from rldsl.plan.derive_ops import DERIVE_OPS
from rldsl.plan.heads import GENERATE
from rldsl.plan.model import Value
from rldsl.semantics.errors import Errors
from rldsl.source import Span
from rldsl.syntax import ast

Block = g.When | g.Repeat | g.Until | g.Eval


def nodes_ahead(items: Iterable[g.Item], lasting: frozenset[str], where: Span, errors: Errors
                ) -> frozenset[str]:
    """lasting: values that live from step to step. where: the flow's name. Errors: RL0223; where the program has
    others, not that nothing runs ahead, since a call of `generate` may be missing because of them."""
    placed = list(_with_blocks(items))
    writer = {v: at for at in placed for v in at[0].writes if v not in lasting}
    waiting = [at for at in placed if isinstance(at[0], g.Generate) and not at[0].in_step
               and not any(isinstance(b, g.Eval) for b in at[1])]
    if not waiting and errors.found:
        return frozenset()
    if not waiting:
        own = any(isinstance(node, g.Generate) and node.in_step for node, _ in placed)
        why, help = ("every call has `lag=0`", "that of a call") if own else (
            "no step generates anything", "generate responses in the flow")
        errors.add("RL0223", f"`lag` has no effect: {why}", where, help=f"remove `lag`, or {help}")
        return frozenset()
    first, found, named = waiting[0][0], dict[str, g.Node](), list[g.Item]()
    while waiting:
        node, blocks = waiting.pop()
        if node.id in found:
            continue
        found[node.id] = node
        block = next((b for b in blocks if isinstance(b, g.Repeat | g.Eval)), None)
        if block is not None and any(block is x for x in named):
            pass  # one error for each block
        elif block is not None:
            named.append(block)
            errors.add("RL0223", f"with `lag`, `{node.id}` cannot be in this block", node.span,
                       "each iteration generates with what the one before it has trained, so none can run a step ahead"
                       if isinstance(node, g.Generate) and isinstance(block, g.Repeat) else
                       "generation, and what it is made from, runs ahead of the rest of its step",
                       help=_way_out(node, block))
        elif isinstance(node, g.Generate) and node.in_step:
            below = " or move this one below the block" if any(isinstance(b, g.Until) for b in blocks) else ""
            errors.add("RL0223", f"`{first.id}` runs ahead, but `{node.id}`, {_relation(blocks)}, does not", node.span,
                       "this call runs in its own step", help=f"give both the same `lag`{',' if below else ''}{below}")
        elif isinstance(node, g.Train | g.Sync | g.Update | g.Store):
            errors.add("RL0223", f"with `lag`, what is generated cannot depend on `{node.id}` of the same step",
                       node.span, f"`{first.id}` runs ahead of the rest of its step",
                       help="generate from prompts, other responses or a `state`")
        elif not lasting.isdisjoint(node.writes):
            errors.add("RL0223", "with `lag`, a `repeat ... until` that runs ahead cannot change a `state`", node.span,
                       "the steps before have not ended yet", help="change it below the block")
        of_frames = (f"{f}.tokens" for f in (node.frames if isinstance(node, g.Compute) else ()))
        waiting += [writer[v] for v in (*node.reads, *of_frames) if v in writer]
        if isinstance(node, g.Fetch):  # the batches of a source are read in order
            waiting += [at for at in placed if isinstance(at[0], g.Fetch) and at[0].data == node.data
                        and not any(isinstance(b, g.Eval) for b in at[1])]
        for until in blocks:  # how often it runs depends on everything in it
            if isinstance(until, g.Until):
                waiting += [at for at in placed if any(until is b for b in at[1])]
    return frozenset(found)


def _relation(blocks: Sequence[Block]) -> str:
    """Of a node that must run ahead to one that does."""
    until = any(isinstance(b, g.Until) for b in blocks)
    return "in the same `repeat ... until`" if until else "from which it is made"


def check_lag(lag: int, steps: int | None, where: Span, errors: Errors) -> bool:
    """Whether some step trains on responses of a later policy than the first. steps: of the flow; None if they
    are not known. Errors: RL0205."""
    if steps is None or lag < max(steps, 1) or not lag:
        return True
    errors.add("RL0205", "`lag` must be less than `steps`", where,
               f"this is {lag}, and the flow has {counted(steps, 'step')}",
               help="all responses would come from the initial policy: " + (
                   f"use a lag of at most {steps - 1}, or more steps" if steps > 1 else "use more steps, or no lag"))
    return False


def _way_out(node: g.Node, block: g.Repeat | g.Eval) -> str:
    if isinstance(node, g.Fetch):  # no generation at the top level can be made from it, but one is from its source
        return f"declare a second `data` for the block: what runs ahead reads `{node.data}`, too"
    if isinstance(block, g.Repeat):
        return "make each iteration a separate step, or move this out of the block"
    return f"move it out of its block, or {'give the call `lag=0`' if isinstance(node, g.Generate) else 'remove `lag`'}"


def nodes_that_may(items: tuple[g.Item, ...], lasting: frozenset[str], ahead: frozenset[str],
                   values: Sequence[Value]) -> frozenset[str]:
    """The nodes that may run up to `lag` steps ahead although no generation needs them: all that they are made from
    runs ahead or may, and is the same in every step in which it could be read. ahead: of `nodes_ahead`."""
    inputs = inputs_of(items, values)
    changing = {n.model for n in g.nodes(items) if isinstance(n, g.Train | g.Sync)}
    early = {v for n in g.nodes(items) if n.id in ahead for v in n.writes}
    found = set[str]()
    for node in of_steps(items):
        if (isinstance(node, g.Compute | g.Infer | g.Derive) and node.id not in ahead
                and not (isinstance(node, g.Infer) and node.model in changing)
                and lasting.isdisjoint((*node.reads, *node.writes)) and early.issuperset(inputs(node))):
            found.add(node.id)
            early.update(node.writes)
    return frozenset(found)


def inputs_of(items: Iterable[g.Item], values: Iterable[Value]) -> Callable[[g.Node], frozenset[str]]:
    """A function that says what a node needs: what it reads, and the tokens of the derived frames that it counts, or
    whose values it reads or writes, since these say which rows there are."""
    frame_of = {v.id: v.frame for v in values}
    derived = {n.frame for n in g.nodes(items) if isinstance(n, g.Derive) and DERIVE_OPS[n.op].makes_rows}

    def inputs(node: g.Node) -> frozenset[str]:
        of_counts = node.frames if isinstance(node, g.Compute) else ()
        frames = {*of_counts, *(frame_of.get(v, "") for v in (*node.reads, *node.writes))} & derived
        return frozenset({*node.reads, *(f"{f}.tokens" for f in frames)}.difference(node.writes))

    return inputs


def _with_blocks(items: Iterable[g.Item], blocks: tuple[Block, ...] = ()) -> Iterator[tuple[g.Node, tuple[Block, ...]]]:
    """Every node with the blocks around it, outermost first."""
    for item in items:
        if isinstance(item, Block):
            yield from _with_blocks(item.body, (*blocks, item))
        else:
            yield item, blocks


def of_steps(items: Iterable[g.Item]) -> Iterator[g.Node]:
    """The nodes that run at most once in a step, in program order: not those of loops."""
    for item in items:
        if isinstance(item, g.When):
            yield from of_steps(item.body)
        elif isinstance(item, g.Node):
            yield item


def with_lag(file: ast.File, lag: int) -> ast.File:
    """The program with another lag; with 0, of its calls, too."""
    return replace(file, items=tuple(_with_lag(item, lag) if isinstance(item, ast.Flow) else item
                                     for item in file.items))


def generates(call: ast.Call) -> bool:
    """Whether it is `model.generate(...)`, which may have its own lag."""
    return isinstance(call.func, ast.Attribute) and call.func.name.name == GENERATE


def _with_lag(flow: ast.Flow, lag: int) -> ast.Flow:
    others = tuple(o for o in flow.options if o.name.name != "lag")
    at = flow.name.span
    given = ast.Option(span=at, name=ast.Ident(span=at, name="lag"), value=ast.Number(span=at, value=lag))
    return replace(flow, options=(*others, given), body=flow.body if lag else _without_lags(flow.body))


def _without_lags(node: Any) -> Any:
    """A tree, or several, in which no call of `generate` has a lag."""
    if isinstance(node, tuple):
        return tuple(map(_without_lags, node))
    if not isinstance(node, ast.Tree):
        return node
    changed = replace(node, **{f.name: _without_lags(getattr(node, f.name)) for f in fields(node) if f.name != "span"})
    if isinstance(changed, ast.Call) and generates(changed):
        kept = tuple(a for a in changed.args if a.name is None or a.name.name != "lag")
        return replace(changed, args=kept)
    return changed
