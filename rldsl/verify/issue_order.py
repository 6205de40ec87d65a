"""Inside a call, too, every rank issues its communication in one order.

In: tables with sound references. Out: diagnostics RL0537. A call runs on the communicators of its layout: those of
tensor, context and expert parallelism, the links between pipeline stages, and those of dp and of all its ranks. What a
rank issues on them, and in which order, is the backend's own matter; `IssueOrder` states it once more for the torch
backend, use by use, and other backends derive theirs from it (`Description.issue_order`). The lists of all ranks of a
layout are searched for a cycle of uses that wait for each other (rendezvous). Layouts with degrees that a backend does
not have are refused, and so are backends that do not exist. Together with `total_order.py` this shows that the list of
each rank over all communicators increases in one total order: events in the body's order, and uses inside each event.
Operations that are waited for later than they are issued (transfers, reallocs, sends between stages) only wait for
less.

Copies of a model over dp are the same until they communicate, and so are the ranks of a tensor- or context-parallel
group; two of each are checked, and all stages; of ranks that share experts, two in each of two groups. Micro-batches:
a single one, and more than there are stages.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

from rldsl.diag import Diagnostic
from rldsl.plan.backends import DIVISIONS, costs, described
from rldsl.plan.events import Event, Generate, Infer, Save, Train
from rldsl.plan.model import Layout
from rldsl.plan.references import Role, references
from rldsl.sharding.layout import Coordinate
from rldsl.sharding.pipeline_schedule import Exchange, actions
from rldsl.verify.tables import Tables, name, problem
from rldsl.verify.total_order import circle

AXES = ("tp", "cp", "pp", "dp", "ep", "expert_dp", "mesh", "link", "tokens")


class Use(NamedTuple):
    """One use of a communicator."""

    axis: str  # of `AXES`; "link": between a stage and the next one, "tokens": between a stage and the last
    stage: int  # to which the communicator belongs
    dp: int  # to which the communicator belongs
    flow: str = ""  # what is sent over a link: "down" to the next stage, or in training which message


Instance = tuple[int, ...]  # coordinates inside a stage that the communicator does not join: one communicator for each
Protocol = Callable[[Layout, Coordinate, int], Iterator[Use]]


def check_issue_order(t: Tables) -> Iterator[Diagnostic]:
    known: dict[object, str] = {}
    for e, _ in t.events:
        if not e.traits.backend_communicates:
            continue
        x = t.layouts[next(r.id for r in references(e) if r.role is Role.LAYOUT)]
        key = _case(type(e), x)
        if key not in known:
            known[key] = _fault(type(e), x)
        if known[key]:
            yield problem("RL0537", f"{name(e)} under layout {x.id} {known[key]}", e, ranks=t.event_ranks(e))


def _case(kind: type[Event], x: Layout) -> tuple[object, ...]:
    """Layouts with the same case issue the same lists: everything that `stuck` and the protocols ask of a layout."""
    return kind, x.backend, x.tp > 1, x.pp, _copies(x), x.ep < x.dp, x.cp, x.ep, x.zero, x.vpp


def _fault(kind: type[Event], x: Layout) -> str:
    if x.zero and kind in (Generate, Infer):
        return f"has zero={x.zero}, which is supported only in training"
    if x.vpp > 1 and kind in (Generate, Infer):
        return f"has vpp={x.vpp}, which is supported only in training"
    if kind is Generate and x.cp > 1:
        return f"has cp={x.cp}, which generation does not support"
    backend = described(x.backend)
    if backend is None:
        return f"uses backend {x.backend!r}, whose communication is unknown"
    order = costs(x.backend, "issue_order", IssueOrder)
    if kind is not Save:  # which only reads what is there
        others = [d for d in DIVISIONS if getattr(x, d) > 1 and d not in backend.divisions]
        if kind.kind not in backend.calls or others or x.zero > backend.zero:
            return f"uses a feature that backend {x.backend!r} does not support"
    protocol = order.of(kind)
    return next((f for count in {1, x.pp + 2} if (f := stuck(protocol, x, count))), "")


def stuck(protocol: Protocol, x: Layout, count: int) -> str:
    """Why the ranks of a layout would wait for each other forever, or "". count: of micro-batches."""
    lists: dict[Coordinate, list[int]] = {
        Coordinate(*at): [] for at in product(range(x.pp), _copies(x), *(range(min(d, 2)) for d in (x.cp, x.tp)))}
    members: dict[tuple[Use, Instance], set[Coordinate]] = defaultdict(set)
    numbers: dict[tuple[Use, Instance, int], int] = {}  # the n-th use of a communicator -> its number
    flows: dict[int, str] = {}
    for at, uses in lists.items():
        times: Counter[tuple[Use, Instance]] = Counter()
        for use in protocol(x, at, count):
            if not isinstance(use, Use) or use.axis not in AXES:
                return f"issues {use!r}, which is no use of a communicator"
            own = (use._replace(flow=""), _instance(use.axis, at))
            times[own] += 1
            uses.append(number := numbers.setdefault((*own, times[own]), len(numbers)))
            members[own].add(at)
            if flows.setdefault(number, use.flow) != use.flow:
                return f"has stages {use.stage} and {use.stage + 1} whose sends and receives do not match"
    held = Counter(n for uses in lists.values() for n in uses)
    for (use, instance, time), n in numbers.items():
        if held[n] != len(members[use, instance]):
            return f"has ranks that do not take part in use {time} of {use.axis}"
    found = circle({tuple(uses) for uses in lists.values()})
    return f"has ranks that wait for each other in {len(found)} uses of its communicators" if found else ""


def _copies(x: Layout) -> tuple[int, ...]:
    """The dp coordinates that are checked."""
    found = range(min(x.dp, 2)) if x.ep == 1 else (0, 1, x.ep, x.ep + 1)
    return tuple(d for d in found if d < x.dp)


def _instance(axis: str, at: Coordinate) -> Instance:
    return {"tp": (at.cp,), "cp": (at.tp,), "mesh": ()}.get(axis, (at.cp, at.tp))


# --------------------------------------------------------------------------------------------- what is issued


class IssueOrder:
    """The communication of one backend inside its calls: for each kind of call, the uses of communicators by one rank,
    in the order in which it issues them. This class states the torch backend's; derive from it and override what
    differs.

    x: the layout. at: the rank's coordinates. count: of micro-batches, or of decoding steps."""

    def of(self, kind: type[Event]) -> Protocol:
        """The uses of a kind of call."""
        return {Generate: self.generate, Infer: self.infer, Train: self.train, Save: self.save}[kind]

    def generate(self, x: Layout, at: Coordinate, count: int) -> Iterator[Use]:
        """There are as many groups of sequences as stages, and at clock tick t stage s makes pass t - s. Between two
        ticks hidden states go to the next stage, and tokens from the last stage to all. The messages of a boundary are
        listed one after the other, though they are posted together: that waits for less."""
        last, passes = x.pp - 1, range(count * x.pp)
        for t in range(len(passes) + last):
            if t - at.pp in passes:
                yield from _over(x, at, "ep")  # whether any of its ranks has more sequences
                yield from _inside(x, at)
            for s in range(last):
                if t - s in passes and at.pp in (s, s + 1):
                    yield Use("link", s, at.dp, "down")
            for s in range(last):
                if t - last in passes and at.pp in (s, last):
                    yield Use("tokens", s, at.dp)

    def infer(self, x: Layout, at: Coordinate, count: int) -> Iterator[Use]:
        """Micro-batch by micro-batch; then the results."""
        for _ in range(count):
            yield from _link(x, at, -1, "down")
            yield from _inside(x, at)
            yield from _link(x, at, 1, "down")
        yield from _over(x, at, "pp")

    def train(self, x: Layout, at: Coordinate, count: int) -> Iterator[Use]:
        """Two minibatches, by the schedule of the pipeline."""
        for _ in range(2):
            if x.zero:
                yield from _divided(x, at)  # parameters outside the layers
            for action in actions(x.pp, x.vpp, count)[at.pp]:
                if isinstance(action, Exchange):
                    yield from _exchange(x, at, action)
                else:
                    yield from _backward(x, at) if action.backward else _forward(x, at)
            yield from _over(x, at, "mesh")  # whether to stop
            if x.zero == 1:
                yield from _divided(x, at)
            yield from _inside(x, at)
            yield from _over(x, at, "pp")  # gradients of tied embeddings
            yield from _over(x, at, "cp")
            if not x.zero:
                yield from _divided(x, at)
            yield from _over(x, at, "mesh")  # the norm of the gradient
        yield from _over(x, at, "mesh")  # metrics

    def save(self, x: Layout, at: Coordinate, count: int) -> Iterator[Use]:
        """Three collectives of all ranks."""
        for _ in range(3):
            yield from _over(x, at, "mesh")


def _inside(x: Layout, at: Coordinate) -> Iterator[Use]:
    """The collectives of a stage, forward or backward; the ranks of a stage that have the same rows run one program."""
    if x.tp > 1:
        yield Use("tp", at.pp, at.dp)
    if x.cp > 1:
        yield Use("cp", at.pp, at.dp)
    yield from _over(x, at, "ep")  # tokens, to their experts and back


def _link(x: Layout, at: Coordinate, to: int, flow: str) -> Iterator[Use]:
    """One exchange with the stage before (-1) or after (1)."""
    if 0 <= at.pp + to < x.pp:
        yield Use("link", min(at.pp, at.pp + to), at.dp, flow)


def _exchange(x: Layout, at: Coordinate, now: Exchange) -> Iterator[Use]:
    """The messages of an exchange one after the other, by sender, though they are posted together: that waits for less.
    The link of a rank is the one to the next stage, and of the last stage the one to the first; two stages have one."""
    for _, peer, wanted in sorted((*((at.pp, m.peer, m.for_pass) for m in now.sends),
                                   *((m.peer, m.peer, m.for_pass) for m in now.receives))):
        around = {at.pp, peer} == {0, x.pp - 1} and x.pp > 2
        yield Use("link", x.pp - 1 if around else min(at.pp, peer), at.dp, f"for {wanted}")


def _over(x: Layout, at: Coordinate, axis: str) -> Iterator[Use]:
    if axis == "pp" and x.pp > 1:
        yield Use("pp", 0, at.dp)
    elif axis == "cp" and x.cp > 1:
        yield Use("cp", at.pp, at.dp)
    elif axis == "dp" and x.dp > 1:
        yield Use("dp", at.pp, 0)
    elif axis == "ep" and x.ep > 1:
        yield Use("ep", at.pp, at.dp // x.ep)
    elif axis == "expert_dp" and 1 < x.ep < x.dp:
        yield Use("expert_dp", at.pp, at.dp % x.ep)
    elif axis == "mesh" and x.dp * x.tp * x.pp * x.cp > 1:
        yield Use("mesh", 0, 0)


def _forward(x: Layout, at: Coordinate) -> Iterator[Use]:
    """In training. A layer's parameters are gathered before it computes, or while the layer before it does."""
    if x.zero == 3:
        yield from _divided(x, at)
    yield from _inside(x, at)


def _divided(x: Layout, at: Coordinate) -> Iterator[Use]:
    """Over the ranks that `zero` divides parameters among; experts have ranks of their own."""
    yield from _over(x, at, "dp")
    yield from _over(x, at, "expert_dp")


def _backward(x: Layout, at: Coordinate) -> Iterator[Use]:
    yield from _forward(x, at)
    if x.zero > 1:
        yield from _divided(x, at)  # gradients
