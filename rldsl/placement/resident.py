"""What a placement may say of parameters between calls: moved to host memory (`offload`), or dropped (`keep=false`).

In: calls with their places, and the homes of trained models. Out: nothing, or RL0317 and RL0322 with what to say
instead; the warning RL0907 where calls of a frozen model do not agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from rldsl.diag import Diagnostic, Failure, Label, fail
from rldsl.graph import model as g
from rldsl.placement.model import Call, Place, label
from rldsl.placement.rules import option_span


def check(graph: g.Graph, calls: Iterable[Call], places: Mapping[str, Place], homes: Mapping[str, str]) -> None:
    """homes: of the trained models."""
    adapted, calls = {m.name for m in graph.models if m.lora is not None}, tuple(calls)
    stays = {n.model: n for n in calls if isinstance(n, g.Train) and not places[n.id].offload}
    for node in calls:
        place = places[node.id]
        if place.offload and place.layout.id != homes.get(node.model, place.layout.id):
            raise fail("RL0317", f"`{label(node)}` runs on a copy of what is trained, which is not offloaded",
                       option_span(place.span, "offload"), f"`{node.model}` is trained under another layout",
                       help="`keep=false` drops the copy between its uses; `offload=true` of the train call moves what "
                            "is trained, and its optimizer's state")
        if place.offload and node.model in stays:
            train = stays[node.model]
            raise Failure([Diagnostic(
                "RL0317", f"`{label(node)}` runs on what is trained, which is not offloaded",
                option_span(place.span, "offload"), f"`{label(train)}` does not ask for it",
                (Label(train.span, "this keeps it on the device"),),
                help="say `offload=true` of the train call: it moves what is trained, and its optimizer's state")])
        if not place.keep and (why := _only_one(node, homes, adapted)):
            raise fail("RL0322", f"`{label(node)}` has no copy that could be dropped", option_span(place.span, "keep"),
                       why[0], help=why[1])


def idle(graph: g.Graph, places: Mapping[str, Place]) -> Iterator[Diagnostic]:
    """Of each copy of a frozen model that a call wants in host memory and another one on the device, where it stays."""
    calls = [n for n in g.nodes(graph.items) if isinstance(n, Call)]
    trained = {n.model for n in calls if isinstance(n, g.Train)}
    stays = {(n.model, places[n.id].layout.id): n for n in reversed(calls) if not places[n.id].offload}
    for node in calls:
        other, place = stays.get((node.model, places[node.id].layout.id)), places[node.id]
        if place.offload and other is not None and node.model not in trained:
            yield Diagnostic("RL0907", f"`{label(node)}` leaves its model on the device",
                             option_span(place.span, "offload"), "this changes nothing",
                             (Label(other.span, "this uses the same parameters, and keeps them there"),),
                             help=f"say `offload=true` of all calls of `{node.model}`: `place {node.model}.* ...`",
                             severity="warning")


def _only_one(node: Call, homes: Mapping[str, str], adapted: set[str]) -> tuple[str, str] | None:
    """Why the parameters that a call uses could not be made again from others, and what to say instead."""
    if node.model not in homes:
        return "nothing trains it: it is loaded once", "`offload=true` keeps it in host memory between its calls"
    if isinstance(node, g.Train):
        return "its parameters live here", "say it of calls under another layout, such as `generate`"
    if node.model in adapted:
        return "it trains adapters, and its copies share what is large, the base", "remove `keep=false`"
    return None
