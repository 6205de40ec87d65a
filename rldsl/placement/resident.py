"""What a placement may say of parameters between calls: moved to host memory (`offload`), or dropped (`keep=false`).

In: calls with their places, and the training layouts of trained models. Out: nothing, or RL0317 and RL0322 with what to
say instead; the warning RL0907 where calls of a frozen model do not agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from rldsl.diag import Diagnostic, Failure, Label, fail
from rldsl.graph import model as g
from rldsl.placement.model import Call, Placement, label
from rldsl.placement.rules import option_span


def check_residency(graph: g.Graph, calls: Iterable[Call], placements: Mapping[str, Placement],
                    train_layouts: Mapping[str, str]) -> None:
    """train_layouts: trained model -> id of its training layout. Errors: RL0317, RL0322."""
    adapted, calls = {m.name for m in graph.models if m.lora is not None}, tuple(calls)
    stays = {n.model: n for n in calls if isinstance(n, g.Train) and not placements[n.id].offload}
    for node in calls:
        placement = placements[node.id]
        if placement.offload and placement.layout.id != train_layouts.get(node.model, placement.layout.id):
            raise fail("RL0317", f"`{label(node)}` uses a copy of trained parameters, which cannot be offloaded",
                       option_span(placement.span, "offload"), f"`{node.model}` is trained under another layout",
                       help="use `keep=false` to free the copy between uses; `offload=true` on the train call offloads "
                            "the trained parameters and the optimizer state")
        if placement.offload and node.model in stays:
            train = stays[node.model]
            raise Failure([Diagnostic(
                "RL0317", f"`{label(node)}` uses the trained parameters, which are not offloaded",
                option_span(placement.span, "offload"), f"`{label(train)}` does not set it",
                (Label(train.span, "this keeps the parameters on the device"),),
                help="set `offload=true` on the train call: it offloads trained parameters and optimizer state")])
        if not placement.keep and (why := _only_one(node, train_layouts, adapted)):
            raise fail("RL0322", f"`{label(node)}` has no copy to drop", option_span(placement.span, "keep"),
                       why[0], help=why[1])


def idle_copies(graph: g.Graph, placements: Mapping[str, Placement]) -> Iterator[Diagnostic]:
    """A warning for each copy of a frozen model that one call offloads and another keeps on the device."""
    calls = [n for n in g.nodes(graph.items) if isinstance(n, Call)]
    trained = {n.model for n in calls if isinstance(n, g.Train)}
    stays = {(n.model, placements[n.id].layout.id): n for n in reversed(calls) if not placements[n.id].offload}
    for node in calls:
        other, placement = stays.get((node.model, placements[node.id].layout.id)), placements[node.id]
        if placement.offload and other is not None and node.model not in trained:
            yield Diagnostic("RL0907", f"`offload=true` on `{label(node)}` has no effect",
                             option_span(placement.span, "offload"), "another call keeps the parameters on the device",
                             (Label(other.span, "this call uses the same parameters without `offload=true`"),),
                             help=f"set `offload=true` on all calls of `{node.model}`: `place {node.model}.* ...`",
                             severity="warning")


def _only_one(node: Call, train_layouts: Mapping[str, str], adapted: set[str]) -> tuple[str, str] | None:
    """Why the parameters that a call uses could not be made again from others, and what to say instead."""
    if node.model not in train_layouts:
        return ("the model is never trained: it is loaded only once",
                "`offload=true` keeps it in host memory between its calls")
    if isinstance(node, g.Train):
        return "this is its training layout", "use `keep=false` only on calls under another layout, such as `generate`"
    if node.model in adapted:
        return "with an adapter, all copies share the base parameters", "remove `keep=false`"
    return None
