"""Calls of `generate` whose log-probs are those of another engine than the one that trains.

In: a graph and the places of its calls. Out: these calls; and the graph with two metrics for each of them on whose rows
its model is trained: the mean and the maximum of the absolute difference of both log-probs. They are computed with the
parameters that sampled, before the next training, on the log-probs that the program infers, or else on those of an
inference call that is added, under the layout of the training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rldsl.graph import model as g
from rldsl.placement.model import Placement, layout_of
from rldsl.plan.backends import described
from rldsl.plan.expr import Node, Program
from rldsl.plan.model import Value

DIFFERENCE = "logprob_difference"  # NAME/logprob_difference, and NAME/logprob_difference_max
INFERRED = "trainer_logprobs"  # ends the id of the call that is added, and of its value


def other_engines(graph: g.Graph, placements: Mapping[str, Placement]) -> dict[str, str]:
    """Id of each such call -> its backend."""
    found: dict[str, str] = {}
    for node in g.nodes(graph.items):
        if isinstance(node, g.Generate) and node.id in placements:
            backend = placements[node.id].layout.backend
            known = described(backend)
            if known is not None and known.other_logprobs:
                found[node.id] = backend
    return found


def with_differences(graph: g.Graph, placements: Mapping[str, Placement]) -> tuple[g.Graph, dict[str, Placement]]:
    """The graph with the metrics, and the places of all calls and computations. A call in an `eval` gets none, and
    neither does one in another block where a lag lets blocks run ahead as a whole. A graph that has them keeps them: a
    search places the graph of a program again."""
    placed = dict(placements)
    engines = other_engines(graph, placements)
    trains: dict[str, g.Train] = {}  # model -> its first training
    for node in g.nodes(graph.items):
        if isinstance(node, g.Train):
            trains.setdefault(node.model, node)
    for node in tuple(g.nodes(graph.items)):
        if isinstance(node, g.Generate) and node.id in engines and node.model in trains \
                and (node in graph.items or not graph.lag) and not _in_eval(graph.items, node) \
                and not _has_difference(graph, node):
            graph = _with_difference(graph, node, trains[node.model], placed)
    return graph, placed


def _in_eval(items: tuple[g.Item, ...], node: g.Node) -> bool:
    """Also in one that other blocks hold, as `every 50 { eval heldout { ... } }`."""
    return any(node in g.nodes(item.body) if isinstance(item, g.Eval) else _in_eval(item.body, node)
               for item in items if isinstance(item, g.When | g.Repeat | g.Until | g.Eval))


def _has_difference(graph: g.Graph, made: g.Generate) -> bool:
    return any(p.id == f"{made.frame}.{DIFFERENCE}" for p in graph.programs)


def _with_difference(graph: g.Graph, made: g.Generate, train: g.Train, placements: dict[str, Placement]) -> g.Graph:
    known, new = _inferred(graph.items, made), list[g.Node]()
    values = list(graph.values)
    placement, after = placements[train.id], known or made
    if known is None:
        frame = next(f for f in graph.frames if f.id == made.frame)
        id = f"{made.frame}.{INFERRED}"
        known = g.Infer(id=id, reads=(f"{made.frame}.tokens",), writes=(id,), span=made.span, model=made.model,
                        frame=made.frame, output_name="logprobs", value=id, temperature=frame.temperature)
        values.append(Value(id, made.frame, "token", "response", label=f"{made.model}.logprobs({made.frame})"))
        placements[id] = replace(placement, recompute="none", span=None,
                                 why=f"for the metric {made.frame}/{DIFFERENCE}: as {train.id}")
        new.append(known)
    id = f"{made.frame}.{DIFFERENCE}"
    sampled, outputs = f"{made.frame}.logprobs", (id, f"{id}_max")
    at = next(p.at for p in graph.programs if p.id == train.loss)
    new.append(g.Compute(id=id, reads=(known.value, sampled), writes=outputs, span=made.span, program=id,
                         frames=(made.frame,), inputs=((known.value, known.value), (sampled, sampled)),
                         outputs=tuple((x, x) for x in outputs), label=f"{made.frame}/{DIFFERENCE}"))
    placements[id] = Placement(placement.mesh, layout_of(placement.mesh, dp=placement.mesh.size), 0, False, None,
                               f"default: same as {train.id}")
    values += [Value(x, "", "batch", "batch") for x in outputs]
    metrics = tuple((x.replace(".", "/"), x) for x in outputs)
    return replace(graph, items=_inserted(graph.items, after, tuple(new)), values=tuple(values),
                   programs=(*graph.programs, _program(id, made.frame, known.value, sampled, at)),
                   metrics=(*graph.metrics, *metrics))


def _inferred(items: tuple[g.Item, ...], made: g.Generate) -> g.Infer | None:
    """The call that infers the log-probs of the rows with the parameters that sampled them, in the same block."""
    if made not in items:
        inner = (_inferred(item.body, made) for item in items if isinstance(item, g.When | g.Repeat | g.Until | g.Eval))
        return next((found for found in inner if found is not None), None)
    for item in items[items.index(made) + 1:]:
        if not isinstance(item, g.Node):
            return None
        if isinstance(item, g.Train | g.Sync) and item.model == made.model:
            return None
        if isinstance(item, g.Infer) and (item.model, item.frame, item.output_name) == (made.model, made.frame,
                                                                                        "logprobs"):
            return item
    return None


def _inserted(items: tuple[g.Item, ...], after: g.Node, new: tuple[g.Node, ...]) -> tuple[g.Item, ...]:
    found: list[g.Item] = []
    for item in items:
        if isinstance(item, g.When | g.Repeat | g.Until | g.Eval):
            item = replace(item, body=_inserted(item.body, after, new))
        found += [item, *(new if item is after else ())]
    return tuple(found)


def _program(id: str, frame: str, inferred: str, sampled: str, at: str) -> Program:
    """mean(abs(inferred - sampled)), and max of the same."""
    nodes = (Node("input", (), "token", frame, (("name", inferred),)),
             Node("input", (), "token", frame, (("name", sampled),)),
             Node("sub", (0, 1), "token", frame), Node("abs", (2,), "token", frame),
             Node("mean", (3,), "batch", "", (("to", "batch"),)), Node("amax", (3,), "batch", "", (("to", "batch"),)))
    return Program(id, nodes, ((id, 4), (f"{id}_max", 5)), at)
