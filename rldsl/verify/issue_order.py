"""Ranks also issue their communication inside each call in one order.

In: tables with sound references. Out: diagnostics RL0537. A call runs on the communicators of its layout: those of
tensor, context and expert parallelism, the links between pp ranks, and those of dp and of all its ranks. What a rank
issues on them, and in which order, is decided by the backend; `IssueOrder` lists it here again for the torch backend,
operation by operation, and other backends derive theirs from it (`Description.issue_order`). The lists of all ranks of
a layout are searched for a cycle of operations that wait for each other (rendezvous). Layouts with degrees that a
backend does not have are refused, and so are backends that do not exist. Together with `total_order.py` this shows that
the list of each rank over all communicators increases in one total order: events in the body's order, and operations
inside each event. Operations that are waited for later than they are issued (transfers, reallocs, sends between pp
ranks) only wait for less.

Dp ranks do the same until they communicate, and so do the ranks of a tensor- or context-parallel group: two of each are
checked, and all pp ranks; of ranks that share experts, two in each of two groups. Micro-batches: a single one, and more
than there are pp ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Literal, NamedTuple

from rldsl.diag import Diagnostic, internal_error
from rldsl.plan.backends import DIVISIONS, costs, described
from rldsl.plan.events import Event, Generate, Infer, ModelCall, Save, Train
from rldsl.plan.model import Layout
from rldsl.plan.references import Role, references
from rldsl.sharding.layout import Coordinate
from rldsl.sharding.pipeline_schedule import Exchange, actions, forward_actions
from rldsl.verify.tables import Tables, name, problem
from rldsl.verify.total_order import find_cycle

AXES = ("tp", "cp", "pp", "dp", "ep", "expert_dp", "mesh", "link", "tokens")


class CommOp(NamedTuple):
    """One operation on a communicator, as one of its ranks issues it."""

    axis: str  # of `AXES`; "link": between a pp rank and the next one, "tokens": between a pp rank and the last
    pp_rank: int  # to which the communicator belongs
    dp: int  # to which the communicator belongs
    message: str = ""  # what is sent over a link: "down" to the next pp rank, or in training which message


# Coordinates along cp and tp that a communicator does not join: there is one communicator for each combination.
GroupCoordinates = tuple[int, ...]
# what a call does besides: environments answer in a `generate`; gradients of a `train` are summed leaf by leaf; a pass
# without gradient comes before each of its minibatches
Variant = Literal["", "converse", "train_in_leaves", "train_twice", "train_twice_in_leaves"]
CommSequence = Callable[[Layout, Coordinate, int], Iterator[CommOp]]  # layout, coordinates, count -> what a rank issues


def check_issue_order(t: Tables) -> Iterator[Diagnostic]:
    faults: dict[object, str] = {}
    for e, _ in t.events:
        if not e.traits.backend_communicates:
            continue
        layout = t.layouts[next(r.id for r in references(e) if r.role is Role.LAYOUT)]
        variant = _variant(t, e)
        loads = isinstance(e, Train) and e.router_bias_update_rate > 0
        key = (*_case(type(e), layout), variant, loads)
        if key not in faults:
            faults[key] = _unsupported_or_deadlocked(type(e), layout, variant, loads)
        if faults[key]:
            yield problem("RL0537", f"{name(e)} under layout {layout.id} {faults[key]}", e, ranks=t.event_ranks(e))


def _variant(t: Tables, e: Event) -> Variant:
    if isinstance(e, Generate) and e.conversation is not None:
        return "converse"
    if not isinstance(e, Train):
        return ""
    if t.spreads[e.spread].leaves:
        return "train_twice_in_leaves" if e.first_pass else "train_in_leaves"
    return "train_twice" if e.first_pass else ""


def _case(kind: type[Event], x: Layout) -> tuple[object, ...]:
    """Layouts with the same case issue the same lists: all that `deadlock_reason` and the sequences ask of a layout."""
    return kind, x.backend, x.tp > 1, x.pp, _dp_coordinates_to_check(x), x.ep < x.dp, x.cp, x.ep, x.zero, x.vpp


def _unsupported_or_deadlocked(kind: type[Event], layout: Layout, variant: Variant, loads: bool) -> str:
    """loads: whether a train call sums the loads of experts."""
    if layout.zero and kind in (Generate, Infer):
        return f"has zero={layout.zero}, which is supported only in training"
    if layout.vpp > 1 and kind in (Generate, Infer):
        return f"has vpp={layout.vpp}, which is supported only in training"
    if kind is Generate and layout.cp > 1:
        return f"has cp={layout.cp}, which generation does not support"
    backend = described(layout.backend)
    if backend is None:
        return f"uses backend {layout.backend!r}, whose communication is unknown"
    order = costs(layout.backend, "issue_order", IssueOrder)
    variants: dict[Variant, CommSequence] = {
        "converse": order.converse, "train_in_leaves": order.train_in_leaves,
        "train_twice": partial(order.train, first_pass=True),
        "train_twice_in_leaves": partial(order.train_in_leaves, first_pass=True)}
    sequence: Callable[..., Iterator[CommOp]] = variants.get(variant) or order.sequence_of(kind)
    if issubclass(kind, ModelCall):  # any other kind only reads parameters, which every backend supports
        if loads and not backend.router_bias:
            return f"moves router biases, which backend {layout.backend!r} cannot"
        if variant.startswith("train_twice") and not backend.first_pass:
            return f"needs a pass before each minibatch, which backend {layout.backend!r} does not have"
        unsupported = [d for d in DIVISIONS if getattr(layout, d) > 1 and d not in backend.divisions]
        if kind.kind not in backend.calls or unsupported or layout.zero > backend.zero:
            return f"uses a feature that backend {layout.backend!r} does not support"
    if loads:
        sequence = partial(sequence, loads=True)
    return next((why for count in {1, layout.pp + 2} if (why := deadlock_reason(sequence, layout, count))), "")


def deadlock_reason(sequence: CommSequence, layout: Layout, count: int) -> str:
    """Why the ranks of a layout would wait for each other forever, or "". count: of micro-batches."""
    lists: dict[Coordinate, list[int]] = {  # rank -> numbers of the operations that it issues
        Coordinate(*at): [] for at in product(range(layout.pp), _dp_coordinates_to_check(layout),
                                              *(range(min(d, 2)) for d in (layout.cp, layout.tp)))}
    members: dict[tuple[CommOp, GroupCoordinates], set[Coordinate]] = defaultdict(set)  # communicator -> its ranks
    numbers: dict[tuple[CommOp, GroupCoordinates, int], int] = {}  # the n-th operation of a communicator -> its number
    message_of: dict[int, str] = {}
    for at, issued in lists.items():
        times: Counter[tuple[CommOp, GroupCoordinates]] = Counter()
        for op in sequence(layout, at, count):
            if not isinstance(op, CommOp) or op.axis not in AXES:
                return f"issues {op!r}, which is no use of a communicator"
            communicator = (op._replace(message=""), _group_coordinates(op.axis, at))
            times[communicator] += 1
            issued.append(number := numbers.setdefault((*communicator, times[communicator]), len(numbers)))
            members[communicator].add(at)
            if message_of.setdefault(number, op.message) != op.message:
                return f"has stages {op.pp_rank} and {op.pp_rank + 1} whose sends and receives do not match"
    num_ranks = Counter(number for issued in lists.values() for number in issued)
    for (op, group, time), number in numbers.items():
        if num_ranks[number] != len(members[op, group]):
            return f"has ranks that do not take part in use {time} of {op.axis}"
    cycle = find_cycle({tuple(issued) for issued in lists.values()})
    return f"has ranks that wait for each other in {len(cycle)} uses of its communicators" if cycle else ""


def _dp_coordinates_to_check(layout: Layout) -> tuple[int, ...]:
    """Two of them; with ep, two in each of two groups of ranks that share experts."""
    candidates = range(2) if layout.ep == 1 else (0, 1, layout.ep, layout.ep + 1)
    return tuple(d for d in candidates if d < layout.dp)


def _group_coordinates(axis: str, at: Coordinate) -> GroupCoordinates:
    return {"tp": (at.cp,), "cp": (at.tp,), "mesh": ()}.get(axis, (at.cp, at.tp))


# --------------------------------------------------------------------------------------------- what is issued


class IssueOrder:
    """The communication of one backend inside its calls: for each kind of call, the operations on communicators of one
    rank, in the order in which it issues them. This class lists those of the torch backend; derive from it and override
    what differs.

    x: the layout. at: the rank's coordinates. count: of micro-batches, or of decoding steps."""

    def sequence_of(self, kind: type[Event]) -> CommSequence:
        """The method for a kind of event. Errors: InternalError for a kind that has none."""
        sequences: Mapping[type[Event], CommSequence] = {
            Generate: self.generate, Infer: self.infer, Train: self.train, Save: self.save}
        if kind not in sequences:
            raise internal_error(f"the verifier has no rule for events of the kind {kind.kind!r}", place="issue order")
        return sequences[kind]

    def generate(self, x: Layout, at: Coordinate, count: int) -> Iterator[CommOp]:
        """There are as many groups of sequences as pp ranks; at clock tick t, pp rank s makes pass t - s. Between two
        ticks hidden states go to the next pp rank, and tokens from the last one to all. The messages of a boundary are
        listed one after the other, though they are posted together: in reality a rank waits for less."""
        last, passes = x.pp - 1, range(count * x.pp)
        for t in range(len(passes) + last):
            if t - at.pp in passes:
                yield from _over(x, at, "ep")  # whether any of its ranks has more sequences
                yield from _inside(x, at)
            for s in range(last):
                if t - s in passes and at.pp in (s, s + 1):
                    yield CommOp("link", s, at.dp, "down")
            for s in range(last):
                if t - last in passes and at.pp in (s, last):
                    yield CommOp("tokens", s, at.dp)

    def converse(self, x: Layout, at: Coordinate, count: int) -> Iterator[CommOp]:
        """A `generate` with environments. After its pass the first tp rank of the last pp rank tells the others there
        what has arrived: how much, and then what. With what was sampled it goes to all pp ranks, in a separate
        message that follows. A rank that knows of a message from what it knows of the pass always takes part, so those
        that a pass does not have are left out on all ranks alike."""
        last, passes = x.pp - 1, range(count * x.pp)
        for t in range(len(passes) + last):
            if t - at.pp in passes:
                yield from _over(x, at, "ep")  # whether any of its ranks has more conversations, and tokens
                yield from _inside(x, at)
                if at.pp == last and x.tp > 1:
                    yield from [CommOp("tp", last, at.dp)] * 2
            for s in range(last):
                if t - s in passes and at.pp in (s, s + 1):
                    yield CommOp("link", s, at.dp, "down")
            for s in range(last) if t - last in passes else ():
                if at.pp in (s, last):
                    yield CommOp("tokens", s, at.dp, "samples")
            for s in range(last) if t - last in passes else ():
                if at.pp in (s, last):
                    yield CommOp("tokens", s, at.dp, "arrivals")

    def infer(self, x: Layout, at: Coordinate, count: int) -> Iterator[CommOp]:
        """Micro-batch by micro-batch; then the results."""
        for _ in range(count):
            yield from _link(x, at, -1, "down")
            yield from _inside(x, at)
            yield from _link(x, at, 1, "down")
        yield from _over(x, at, "pp")

    def train(self, x: Layout, at: Coordinate, count: int, first_pass: bool = False,
              loads: bool = False) -> Iterator[CommOp]:
        """Two minibatches, by the schedule of the pipeline. loads: those of experts are summed."""
        for _ in range(2):
            if x.zero:
                yield from _over_zero_shards(x, at)  # parameters outside the layers
            if first_pass:
                yield from _first_pass(x, at, count)
            yield from _passes(x, at, count)
            yield from _over(x, at, "mesh")  # whether to stop
            if x.zero == 1:
                yield from _over_zero_shards(x, at)
            if x.tp > 1:
                yield CommOp("tp", at.pp, at.dp)  # gradients that are partial over tp
            yield from _over(x, at, "pp")  # gradients of tied embeddings
            yield from _over(x, at, "cp")
            if not x.zero:
                yield from _over_zero_shards(x, at)
            yield from _over(x, at, "mesh")  # the norm of the gradient
            yield from _loads(x, at) if loads else ()
        yield from _over(x, at, "mesh")  # metrics

    def train_in_leaves(self, x: Layout, at: Coordinate, count: int, first_pass: bool = False,
                        loads: bool = False) -> Iterator[CommOp]:
        """Two minibatches of two leaves each: the pipeline runs dry after a leaf, and gradients are reduced at the end,
        those of a pass over cp after it."""
        for _ in range(2):
            if x.zero:
                yield from _over_zero_shards(x, at)  # parameters outside the layers
            if first_pass:
                yield from _first_pass(x, at, 2 * count)
            for _ in range(2):
                yield from _passes(x, at, count, in_leaves=True)
            yield from _over(x, at, "mesh")  # whether to stop
            yield from _over_zero_shards(x, at)  # gradients
            yield from _over(x, at, "dp")  # that of a tied head
            yield from _over(x, at, "pp")  # gradients of tied embeddings
            yield from _over(x, at, "mesh")  # the norm of the gradient
            yield from _loads(x, at) if loads else ()
        yield from _over(x, at, "mesh")  # metrics

    def save(self, x: Layout, at: Coordinate, count: int) -> Iterator[CommOp]:
        """Three collectives of all ranks."""
        for _ in range(3):
            yield from _over(x, at, "mesh")


def _inside(x: Layout, at: Coordinate) -> Iterator[CommOp]:
    """The collectives of a forward or backward pass."""
    if x.tp > 1:
        yield CommOp("tp", at.pp, at.dp)
    if x.cp > 1:
        yield CommOp("cp", at.pp, at.dp)
    yield from _over(x, at, "ep")  # tokens, to their experts and back


def _passes(x: Layout, at: Coordinate, count: int, in_leaves: bool = False) -> Iterator[CommOp]:
    """Of training, by the schedule of the pipeline. in_leaves: gradients are not reduced over dp, but over cp."""
    for action in actions(x.pp, x.vpp, count)[at.pp]:
        if isinstance(action, Exchange):
            yield from _exchange(x, at, action)
        else:
            yield from _forward(x, at)
            if action.backward and in_leaves:
                yield from _over(x, at, "cp")  # gradients
            elif action.backward and x.zero > 1:
                yield from _over_zero_shards(x, at)  # gradients


def _first_pass(x: Layout, at: Coordinate, count: int) -> Iterator[CommOp]:
    """Forward passes alone; then the last pp rank brings the outputs of all dp ranks together."""
    for action in forward_actions(x.pp, x.vpp, count)[at.pp]:
        yield from _exchange(x, at, action) if isinstance(action, Exchange) else _forward(x, at)
    if at.pp == x.pp - 1:
        yield from _over(x, at, "dp")


def _link(x: Layout, at: Coordinate, to: int, message: str) -> Iterator[CommOp]:
    """One exchange with the pp rank before (-1) or after (1)."""
    if 0 <= at.pp + to < x.pp:
        yield CommOp("link", min(at.pp, at.pp + to), at.dp, message)


def _exchange(x: Layout, at: Coordinate, now: Exchange) -> Iterator[CommOp]:
    """The messages of an exchange one after the other, by sender, though they are posted together: in reality a rank
    waits for less. The link of a pp rank is the one to the next, and of the last the one to the first; two pp ranks
    have one link."""
    for _, peer, for_pass in sorted((*((at.pp, m.peer, m.for_pass) for m in now.sends),
                                   *((m.peer, m.peer, m.for_pass) for m in now.receives))):
        wraps = {at.pp, peer} == {0, x.pp - 1} and x.pp > 2
        yield CommOp("link", x.pp - 1 if wraps else min(at.pp, peer), at.dp, f"for {for_pass}")


def _over(x: Layout, at: Coordinate, axis: str) -> Iterator[CommOp]:
    if axis == "pp" and x.pp > 1:
        yield CommOp("pp", 0, at.dp)
    elif axis == "cp" and x.cp > 1:
        yield CommOp("cp", at.pp, at.dp)
    elif axis == "dp" and x.dp > 1:
        yield CommOp("dp", at.pp, 0)
    elif axis == "ep" and x.ep > 1:
        yield CommOp("ep", at.pp, at.dp // x.ep)
    elif axis == "expert_dp" and 1 < x.ep < x.dp:
        yield CommOp("expert_dp", at.pp, at.dp % x.ep)
    elif axis == "mesh" and x.dp * x.tp * x.pp * x.cp > 1:
        yield CommOp("mesh", 0, 0)


def _loads(x: Layout, at: Coordinate) -> Iterator[CommOp]:
    """The loads of experts: each rank has counted its own tokens."""
    yield from _over(x, at, "cp")
    yield from _over(x, at, "dp")


def _forward(x: Layout, at: Coordinate) -> Iterator[CommOp]:
    """In training. With zero=3, parameters are gathered for each layer."""
    if x.zero == 3:
        yield from _over_zero_shards(x, at)
    yield from _inside(x, at)


def _over_zero_shards(x: Layout, at: Coordinate) -> Iterator[CommOp]:
    """Over the ranks that `zero` divides parameters among; experts have their own ranks."""
    yield from _over(x, at, "dp")
    yield from _over(x, at, "expert_dp")
