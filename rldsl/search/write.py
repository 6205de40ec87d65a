"""A placement as the source of a placement file.

In: an answer. Out: text, with a header that says what it is for and how good it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from rldsl.graph import model as g
from rldsl.placement.model import Call, Place
from rldsl.placement.rules import names_of
from rldsl.search.answer import Answer
from rldsl.search.prepare import Prepared
from rldsl.simulate.lengths import Lengths


def source(p: Prepared, answer: Answer, version: str, cluster: str, cut: bool, lines: Sequence[str] = ()) -> str:
    """cut: whether time ended the search. lines: more of the header."""
    best = answer.best[0]
    graph = p.placed.graph
    told = [f"Placement of {graph.program} by rldsl {version}.", "",
            f"cluster    {cluster}: {answer.problem.cluster.nodes} nodes of {answer.problem.cluster.gpus} devices",
            f"predicted  {seconds(best.seconds)} a step ({_lengths(answer.problem.lengths)})"]
    if answer.result.bound:
        told.append(f"bound      {seconds(answer.bound)}: no placement of the space is faster; gap {answer.gap:.2%}")
        told.append(f"search     {answer.result.parts} parts of the space"
                    f"{', ended by --seconds' if cut else ''}; seed 0 (nothing is drawn)")
    told += lines
    machine = graph.cluster
    header = "".join(f"# {line}".rstrip() + "\n" for line in told)
    memory = f" memory_gb={machine.memory_gb:g}" if machine and machine.memory_gb else ""
    size = f"cluster nodes={answer.problem.cluster.nodes} gpus={answer.problem.cluster.gpus}{memory}\n"
    return header + "\n" + size + "\n" + "".join(f"place {rule}\n" for rule in rules(graph, best.places))


def rules(graph: g.Graph, places: dict[str, Place]) -> list[str]:
    """One rule for each call that has a place here; by model and method where these tell calls apart."""
    calls = [n for n in g.nodes(graph.items) if isinstance(n, Call)]
    found = []
    for n in calls:
        if n.id not in places:
            continue
        model, methods = names_of(n)
        same = [o for o in calls if names_of(o) == names_of(n)]
        texts = {clause(places[o.id]) if o.id in places else "" for o in same}
        name = f"{model}.{methods[0]}" if len(texts) == 1 else f"@{n.id}"
        found.append(f"{name} {clause(places[n.id])}")
    found = list(dict.fromkeys(found))
    width = max((len(f.split(" on ")[0]) for f in found), default=0)
    return [f"{f.split(' on ')[0]:<{width}} on {f.split(' on ')[1]}" for f in found]


def clause(p: Place) -> str:
    """`on mesh(0:8) dp=4 tp=2 mbs=1`."""
    x = p.layout
    said = [f"dp={x.dp}", *(f"{k}={v}" for k, v, usual in (
        ("tp", x.tp, 1), ("pp", x.pp, 1), ("vpp", x.vpp, 1), ("cp", x.cp, 1), ("ep", x.ep, 1), ("zero", x.zero, 0),
        ("mbs", p.mbs, 0)) if v != usual)]
    said += ["recompute=full"] if p.recompute == "full" else []
    said += ["offload=true"] if p.offload else []
    said += [] if p.keep else ["keep=false"]
    return f"on mesh({p.mesh.id}) {' '.join(said)}"


def seconds(s: float) -> str:
    return f"{s:,.3g} s" if s >= 0.1 else f"{s * 1e3:.3g} ms"


def _lengths(x: Lengths) -> str:
    if x == Lengths():
        return "sequences as long as the program lets them be"
    return f"prompts of {x.prompt:g} tokens, responses of {x.response:g}, the longest of {x.longest:g}; 0: the most"
