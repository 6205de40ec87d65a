"""Where a model can keep to `invariant=true`, the same numbers for a token whatever is computed with it, and wherever,
and to `invariant=training`, the same parameters after an update.

In: calls with their places, and the families of their models where these are known. Out: nothing, or RL0330, one for
each model. dp, pp, cp, ep, zero and recomputation leave each sum of a forward pass as it is; tp divides sums, which are
cut into blocks (`sharding/sum_blocks.py`), so its degree must divide their number. Gradients are sums over tokens
besides: over passes of fixed rows, in leaves that dp must divide, and groups of tokens that cp must divide
(`sharding/gradient_leaves.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import permutations

from rldsl.diag import Diagnostic, Failure, Label, fail
from rldsl.graph import model as g
from rldsl.models.families import Family
from rldsl.placement.model import Call, Placement, label
from rldsl.placement.rules import option_span
from rldsl.plan.backends import described
from rldsl.plan.expr import Program
from rldsl.sharding.gradient_leaves import LEAVES, TOKEN_GROUPS, divides, pass_tokens
from rldsl.sharding.sum_blocks import BLOCKS, undividable

CONDITIONS = ("lt", "le", "gt", "ge", "and", "or", "not")  # operators whose results are not rounded


def check_invariance(graph: g.Graph, calls: Iterable[Call], placements: Mapping[str, Placement],
                     families: Mapping[str, Family]) -> None:
    """families: empty where no model directory has been read."""
    calls, found = tuple(calls), list[Diagnostic]()
    for name in [m.name for m in graph.models if m.invariant]:  # of each the first problem
        try:
            for node in calls:
                if node.model == name:
                    _check_call(graph, node, calls, placements, families.get(name))
        except Failure as failure:
            found += failure.diagnostics
    if found:
        raise Failure(found)


def _check_call(graph: g.Graph, node: Call, calls: Iterable[Call], placements: Mapping[str, Placement],
                family: Family | None) -> None:
    """A call of an invariant model."""
    model = next(m for m in graph.models if m.name == node.model)
    x, span = placements[node.id].layout, placements[node.id].span
    option = f"invariant={'training' if model.invariant_training else 'true'}"
    known = described(x.backend)
    if known is None or not known.invariant:
        where = _writes(node, "backend", calls, placements)
        inherits = () if where is node else (Label(node.span, f"`{label(node)}` runs where `{label(where)}` does"),)
        raise Failure([Diagnostic(
            "RL0330", f"`{label(node)}` cannot be invariant", option_span(placements[where.id].span, "backend"),
            f"the backend `{x.backend}` uses different kernels", inherits,
            help=f"use `backend=torch`, or remove `{option}` from `{node.model}`")])
    if family is not None and family.invariant_problem:
        raise fail("RL0330", f"`{node.model}` cannot be invariant", model.span, family.invariant_problem,
                   help=f"remove `{option}` from `{node.model}`")
    name, blocks = undividable(family.params, x.tp) or ("", 0) if family else ("", BLOCKS if BLOCKS % x.tp else 0)
    if blocks:
        label_text = f"tp={x.tp} does not divide the {blocks} blocks in which {name or 'a model'} is summed"
        raise fail("RL0330", f"`{label(node)}` cannot be invariant", option_span(span, "tp"), label_text,
                   help=f"use {_degrees('tp', blocks)}, with more dp or pp, or remove `{option}` from `{node.model}`")
    if isinstance(node, g.Train) and node.invariant:
        _check_gradients(node, placements[node.id], pass_tokens(f for f in graph.frames if f.id in node.frames))


def _writes(node: Call, option: str, calls: Iterable[Call], placements: Mapping[str, Placement]) -> Call:
    """The call whose clause has an option that a call shares with it: itself, or one of its model from which it has its
    placement."""
    def has_it(call: Call) -> bool:
        clause = placements[call.id].span
        return clause is not None and option_span(clause, option) != clause

    alike = (c for c in calls if c.model == node.model and placements[c.id].layout.backend ==
             placements[node.id].layout.backend)
    return next((c for c in (node, *alike) if has_it(c)), node)


def _check_gradients(node: g.Train, placement: Placement, tokens: int) -> None:
    """tokens: of a pass, at most."""
    x = placement.layout
    if TOKEN_GROUPS % x.cp:
        option, why = "cp", f"cp={x.cp} does not divide the {TOKEN_GROUPS} parts in which a sequence is summed"
        help = f"use {_degrees('cp', TOKEN_GROUPS)}, with more dp or pp, or `invariant=true` for `{node.model}`"
    elif node.heads and max(x.tp, x.cp) > 1:
        option = "tp" if x.tp > 1 else "cp"
        why = f"{option}={getattr(x, option)} divides the sums of a loss over whole distributions"
        help = f"use {option}=1, with dp, pp or `zero`, or compare the most likely tokens: `.top(gen, k=64)`"
    elif not divides(x.dp):
        option, why = "dp", f"dp={x.dp} does not divide the {LEAVES} parts in which a minibatch is summed"
        help = f"use {_degrees('dp', LEAVES)}, with more pp, or `invariant=true` for `{node.model}`"
    elif placement.mbs:
        option, why = "mbs", "which rows are summed together must not depend on the placement"
        help = f"remove `mbs`, or say how many tokens are computed together: `mbt={tokens}` or more"
    elif 0 < placement.mbt < tokens:
        option, why = "mbt", f"up to {tokens} tokens are summed together whatever the placement is"
        help = f"use `mbt={tokens}` or more, or remove it"
    else:
        return
    raise fail("RL0330", f"the gradients of `{label(node)}` cannot be invariant", option_span(placement.span, option),
               why, help=help)


def varying_inputs(graph: g.Graph) -> Iterator[Diagnostic]:
    """A warning for each model whose results or parameters are not invariant, though what it computes reaches the
    training of one with `invariant=training`."""
    every = tuple(g.nodes(graph.items))
    made_by: dict[str, list[g.Node]] = {}  # a state has several
    for node in every:
        for value in node.writes:
            made_by.setdefault(value, []).append(node)
    conditions = dict(_conditions(graph.items))
    models = {m.name: m for m in graph.models}
    reported: set[str] = set()
    for train in every:
        if not isinstance(train, g.Train) or not train.invariant:
            continue
        # a condition decides how often something happens
        seen, todo = {train.id}, [*train.reads, *conditions.get(train.id, ()), *([graph.stop] if graph.stop else ())]
        while todo:
            for node in made_by.get(todo.pop(), ()):
                if node.id in seen:
                    continue
                seen.add(node.id)
                todo += (*node.reads, *conditions.get(node.id, ()))
                if not isinstance(node, Call):
                    continue
                for found in _varying(models, every, node, train):
                    if found[0] not in reported:
                        reported.add(found[0])
                        yield found[1]


def _conditions(items: Iterable[g.Item], around: tuple[str, ...] = ()) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Of each node, by its id, the conditions of the `repeat ... until` around it."""
    for item in items:
        if isinstance(item, g.When | g.Repeat | g.Until | g.Eval):
            yield from _conditions(item.body, (*around, item.condition) if isinstance(item, g.Until) else around)
        else:
            yield item.id, around


def _varying(models: Mapping[str, g.Model], every: Iterable[g.Node], node: Call, train: g.Train,
             ) -> Iterator[tuple[str, Diagnostic]]:
    """Models that make what a call computes depend on the placement: its own, and those that its parameters come from,
    by name."""
    labels = (Label(node.span, "this computes with it"), Label(train.span, "this trains on the result"))
    if not models[node.model].invariant:
        yield node.model, Diagnostic(
            "RL0908", f"`{node.model}` is not invariant, so the training of `{train.model}` is not either",
            models[node.model].span, "its results depend on the placement by rounding", labels,
            help=f"declare `{node.model}` with `invariant={'training' if models[node.model].optimizer else 'true'}`",
            severity="warning")
        return
    for name, copied in _origins(every, node.model):
        if models[name].optimizer is not None and not models[name].invariant_training:
            passed = tuple(Label(x.span, f"this gives them to `{x.model}`") for x in copied)
            yield name, Diagnostic(
                "RL0908",
                f"the gradients of `{name}` are not invariant, so the training of `{train.model}` is not either",
                models[name].span, "its updated parameters depend on the placement by rounding", (*passed, *labels),
                help=f"declare `{name}` with `invariant=training`", severity="warning")


def _origins(every: Iterable[g.Node], model: str) -> Iterator[tuple[str, tuple[g.Sync, ...]]]:
    """Models whose parameters a model gets, with the `sync` and `ema` that they pass, the last one first."""
    seen, todo = {model}, [(model, tuple[g.Sync, ...]())]
    while todo:
        name, passed = todo.pop()
        yield name, passed
        for node in every:
            if isinstance(node, g.Sync) and node.model == name and node.source not in seen:
                seen.add(node.source)
                todo.append((node.source, (*passed, node)))


def inexact_comparisons(graph: g.Graph) -> Iterator[Diagnostic]:
    """A warning where a program asks whether numbers are equal that only rounding may tell apart: log-probs, values and
    scores of models that are not invariant, or what is computed from them. Not where a number is compared with the
    largest or smallest of its own kind, `x == max(x by prompt)`: that one has the same bits."""
    models, programs = {m.name: m for m in graph.models}, {p.id: p for p in graph.programs}
    terms = _Terms()
    rounded: dict[int, Call] = {}  # term -> the call that rounds it
    for node in g.nodes(graph.items):
        if isinstance(node, g.Generate | g.Infer) and not models[node.model].invariant:
            rounded |= {terms.of_value(value): node for value in node.writes
                        if isinstance(node, g.Infer) or value.endswith(".logprobs")}
        if not isinstance(node, g.Compute):
            continue
        for term, op, args in terms.of(programs[node.program], node):
            found = [rounded[arg] for arg in args if arg in rounded]
            if found and op in ("eq", "ne"):
                if not any(terms.extreme_of.get(a) == b for a, b in permutations(args)):
                    yield _inexact(node, found[0])
            elif found and op not in CONDITIONS:
                rounded[term] = found[0]


class _Terms:
    """Numbers for the terms of all programs. Equal terms have one number, also where a value passes from one program to
    another, so it does not matter in how many statements something is written."""

    def __init__(self) -> None:
        self.numbers: dict[object, int] = {}  # what a term is made of, or the value that it is -> its number
        self.extreme_of: dict[int, int] = {}  # a largest or smallest term -> of which one

    def of_value(self, value: str) -> int:
        return self.numbers.setdefault(value, len(self.numbers))

    def of(self, program: Program, node: g.Compute) -> Iterator[tuple[int, str, tuple[int, ...]]]:
        """Of each node of a program its term, operator, and the terms of its arguments."""
        found, inputs = list[int](), dict(node.inputs)
        for x in program.nodes:
            args = tuple(found[i] for i in x.args)
            if x.op == "input":
                found.append(self.of_value(inputs[str(x.attr("name"))]))
            else:
                made_of = (x.op, args, x.level, x.space, x.attrs)
                found.append(self.numbers.setdefault(made_of, len(self.numbers)))
            if x.op in ("amax", "amin"):
                self.extreme_of[found[-1]] = args[0]
            yield found[-1], x.op, args
        for name, value in node.outputs:
            self.numbers[value] = found[dict(program.outputs)[name]]


def _inexact(node: g.Compute, call: Call) -> Diagnostic:
    return Diagnostic(
        "RL0910", f"`{call.model}` is not invariant, so equality is decided by rounding", node.span,
        "this asks whether numbers are equal", (Label(call.span, "these depend on the placement by rounding"),),
        help=f"declare `{call.model}` with `invariant=true`, or compare with a tolerance: `abs(a - b) < 1e-4`",
        severity="warning")


def _degrees(degree: str, blocks: int) -> str:
    """The values of a degree that divide `blocks`, as text."""
    *most, last = [f"{degree}={d}" for d in range(1, blocks + 1) if blocks % d == 0]
    return f"{', '.join(most)} or {last}" if most else last
