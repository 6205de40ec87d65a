"""How each node of the graph divides its rows among ranks.

In: a node, where it is placed, and the frames. Out: a `Spread`; and how many tokens a train call computes together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal

from rldsl.diag import internal_error
from rldsl.graph import model as g
from rldsl.passes.draft import replicated_spread_id
from rldsl.placement.model import Placement
from rldsl.plan.model import Layout, Mesh, Spread
from rldsl.plan.spaces import IndexedFrame, coarsest
from rldsl.sharding.gradient_leaves import LEAVES, joined_tokens, pass_tokens


def spread_of(node: g.Node, placement: Placement, frames: Mapping[str, IndexedFrame]) -> Spread:
    """How a node divides its rows: whole prompts by count for generation, rows by tokens for other calls, prompts by
    tokens for computations (so that reductions by prompt stay local; the coarsest prompts, where responses are the
    prompts of others)."""
    mesh, layout = placement.mesh.id, placement.layout.id
    match node:
        case g.Generate():  # with `per_step`, a response stays where it began; the number of branches is not known
            several = node.conversation is not None and node.conversation.branches > 1
            how: Literal["count", "slot"] = "slot" if node.per_step or several else "count"
            return with_id(Spread("", mesh, layout, (node.frame,), "prompt", how))
        case g.Infer():
            return with_id(Spread("", mesh, layout, (node.frame,), "row", "tokens"))
        case g.Train():
            unit: Literal["row", "prompt"] = "prompt" if node.whole_prompts else "row"
            return with_id(Spread("", mesh, layout, node.frames, unit, "tokens", node.minibatches, node.epochs,
                                 node.shuffle, node.call if node.shuffle else 0,
                                 LEAVES if node.invariant else 0, node.minibatch_tokens))
        case g.Compute():
            if not node.frames:
                return on_every_rank(placement.mesh)
            return by_prompts(placement, node.frames, frames)
        case g.Collect():  # the same share of every iteration, wherever the rows of an iteration were made
            return with_id(Spread("", mesh, layout, (node.frame,), "prompt", "slot"))
    raise internal_error(f"no spread for {type(node).__name__} {node.id}", "pass node_events")


def tokens_per_pass(node: g.Train, frames: Mapping[str, IndexedFrame], layout: Layout, given: int) -> int:
    """Tokens that are computed together, at most; 0: any number. given: `mbt` of the place. Leaves are computed
    apart under `cp`, and under `zero`, since half precision does not join them there (`Stage.joins_leaves`)."""
    if given or not node.invariant:
        return given
    apart = layout.cp > 1 or layout.zero
    return (pass_tokens if apart else joined_tokens)(frames[f] for f in node.frames)


def by_prompts(placement: Placement, of: Iterable[str], frames: Mapping[str, IndexedFrame]) -> Spread:
    """Whole prompts by tokens, the coarsest of those that some frames have. The rows of a selection lie where those are
    that it was selected from, directly or not."""
    found = coarsest(frames[f] for f in of)
    spaces, divided = {s.id: s for f in frames.values() for s in f.chain}, {f.prompt_space for f in found}

    def is_selected(space: str) -> bool:
        above = spaces[space].of if space in spaces else ""
        return above != "" and (above in divided or is_selected(above))

    chosen = sorted({f.id for f in found if not is_selected(f.prompt_space)})
    return with_id(Spread("", placement.mesh.id, placement.layout.id, tuple(chosen), "prompt", "tokens"))


def on_every_rank(mesh: Mesh) -> Spread:
    """The spread of values that every rank of a mesh holds in full."""
    return Spread(replicated_spread_id(f"ranks {mesh.id}"), mesh.id, granularity="all")


def with_id(s: Spread) -> Spread:
    """`s` with an id made of its content, so that equal spreads have one id."""
    shuffled = f" shuffled {s.call}" if s.shuffle else ""
    size = f" of {s.minibatch_tokens} tokens" if s.minibatch_tokens else ""
    batches = f" x{s.minibatches}{size} x{s.epochs}{shuffled}" if s.minibatches * s.epochs > 1 or size else ""
    leaves = f" in {s.leaves}" if s.leaves else ""
    id = f"{s.layout} {s.granularity} {s.balance_by} {' '.join(s.frames)}{batches}{leaves}"
    return replace(s, id=id)
