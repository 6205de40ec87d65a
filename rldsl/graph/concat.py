"""`concat(a, b, ...)`: the rows of several batches as one.

In: a call of the flow. Out: a frame that has the rows of all parts, with the values that every part has, and the Derive
that makes it. Parts that come from the same rows keep what they have in common: the rows of a prompt are together.
Others get new prompts, one part after the other, if all parts have as many sequences for each prompt.
Errors: RL0202, RL0203, RL0205, RL0213, RL0215, RL0218, each with its position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from rldsl.graph import model as g
from rldsl.graph.computations import label
from rldsl.plan.expr import Level
from rldsl.plan.model import SEQUENCE_VALUES, Space
from rldsl.plan.spaces import IndexedFrame, common_parent, numberings
from rldsl.semantics import units
from rldsl.semantics.errors import BAD, Bad
from rldsl.semantics.levels import source_name
from rldsl.semantics.terms import Term, const, input_
from rldsl.semantics.values import FrameRef, Meaning, Pairs, describe
from rldsl.source import Span
from rldsl.syntax import ast

if TYPE_CHECKING:
    from rldsl.graph.flow import FlowBuilder


FINE: tuple[Level, ...] = ("token", "turn")  # levels below the rows


def concat(flow: FlowBuilder, values: Sequence[Meaning], trees: Sequence[ast.Expr], span: Span,
           target: str | None) -> Meaning:
    """target: the name that the rows are bound to; None: they have none."""
    refs = _checked(flow, values, trees, span)
    if isinstance(refs, Bad):
        return BAD
    parts = [r.frame for r in refs]
    name = target or flow.anonymous("concat")
    fields = _fields(flow, refs, name, span)
    if isinstance(fields, Bad):
        return BAD
    spaces = tuple(_spaces(name, parts))
    frame = flow.spaces.add(replace(
        parts[0].record, id=name, row_space=name, max_prompt_tokens=max(f.max_prompt_tokens for f in parts),
        max_response_tokens=max(f.max_response_tokens for f in parts), selected_from="", picked_from="",
        present_in=name if any(f.present_in for f in parts) else "", label="" if target else label(span)), *spaces)
    if spaces[0].parts:
        flow.spaces.without_columns[spaces[0].id] = "come from several batches"
    if frame.chain[-1].id == name and any(f.per_prompt > 1 for f in parts):
        flow.spaces.ungrouped[name] = " and ".join(str(n) for n in dict.fromkeys(f.per_prompt for f in parts))
    flow.value(f"{name}.lengths", "seq", name, "i64", "lengths")
    known = flow.values
    made: list[tuple[str, str]] = []
    for x in SEQUENCE_VALUES:
        if all(f"{f.id}.{x}" in known for f in parts):
            v = known[f"{parts[0].id}.{x}"]
            flow.value(f"{name}.{x}", v.level, name, v.dtype, v.extent)
            made += [(f"{f.id}.{x}", f"{name}.{x}") for f in parts]
    kept: list[tuple[str, Term]] = []
    for field, terms in fields:
        first, unit = terms[0], terms[0].unit
        for other in terms[1:]:
            unit = units.result("where", (const(True, span), replace(first, unit=unit), other))
        value = flow.value(f"{name}.{field}", first.level, name, first.dtype)
        kept.append((field, input_(value, first.level, flow.spaces.of(frame, first.level), span, first.dtype, unit)))
        made += [(t.name, value) for t in terms]
    flow.items.append(g.Derive(
        id=flow.unique(name), reads=tuple(dict.fromkeys(v for v, _ in made)),
        writes=tuple(dict.fromkeys(w for _, w in made)), span=span, op="concat", source=parts[0].id, frame=name,
        values=tuple(made), parts=tuple(f.id for f in parts)))
    contents = next((c for c in ("prompts", "generated") if all(r.contents == c for r in refs)), "answers")
    same = len({r.base for r in refs}) == 1 and not spaces[0].parts
    numbers = refs[0].numbers if same else ()
    return FrameRef(frame, contents, numbers, refs[0].states if same else (), refs[0].base if same else "",
                    tuple(f for f in kept if f[0] not in numbers))


def _checked(flow: FlowBuilder, values: Sequence[Meaning], trees: Sequence[ast.Expr],
             span: Span) -> list[FrameRef] | Bad:
    """The arguments, if they are batches of rows that can be those of one."""
    errors, refs = flow.errors, list[FrameRef]()
    for value, tree in zip(values, trees, strict=True):
        if not isinstance(value, FrameRef):
            return errors.add("RL0203", f"`concat` takes sequences or prompts, not {describe(value)}", tree.span,
                              help="give it each side: `concat(duel.chosen, duel.rejected)`"
                              if isinstance(value, Pairs) else "")
        if any(value.frame.id == r.frame.id for r in refs):
            return errors.add("RL0215", f"`{source_name(value.frame)}` is passed twice", tree.span,
                              help="each batch once: its rows would be trained on twice")
        refs.append(value)
    first, parts = refs[0], [r.frame for r in refs]
    for ref, tree in zip(refs, trees, strict=True):
        if (ref.contents == "prompts") != (first.contents == "prompts"):
            prompts, sequences = (trees[0], tree) if first.contents == "prompts" else (tree, trees[0])
            return errors.add("RL0213", "`concat` of prompts and sequences", prompts.span,
                              f"`{prompts.span.text}` has no responses, `{sequences.span.text}` has",
                              help="generate from the prompts first")
        if ref.frame.max_turns != first.frame.max_turns:
            return errors.add("RL0213", "`concat` of rows with different numbers of turns", tree.span,
                              f"`{trees[0].span.text}` has {_turns(first.frame)}, `{tree.span.text}` "
                              f"{_turns(ref.frame)}", help="give both the same `max_turns`, or train on each in a "
                                                           "separate call")
        if ref.frame.temperature != first.frame.temperature:
            return errors.add(
                "RL0205", "`concat` of sequences with different temperatures", span,
                f"`{trees[0].span.text}` is sampled at {first.frame.temperature:g}, `{tree.span.text}` at "
                f"{ref.frame.temperature:g}",
                help="log-probabilities of a batch are taken at one temperature: generate all at the same one, or "
                     "train on each in a separate call")
    roots = [f.root_origin for f in parts]
    if not common_parent(parts) and len({*roots}) < len(roots):
        i, j = next((i, j) for j in range(len(roots)) for i in range(j) if roots[i] == roots[j])
        a, b = (trees[k].span.text for k in (i, j))
        return errors.add("RL0202", f"`{a}` and `{b}` come from the same rows, the others do not", span,
                          help=f"concatenate these two first: `both = concat({a}, {b})`, then `concat(both, ...)`")
    return refs


def _turns(frame: IndexedFrame) -> str:
    return f"up to {frame.max_turns} turns" if frame.max_turns else "no turns"


def _spaces(name: str, parts: Sequence[IndexedFrame]) -> Iterator[Space]:
    """The spaces of the rows of all parts, the root first."""
    count, parent, fans = sum(f.count for f in parts), common_parent(parts), {f.per_prompt for f in parts}
    if parent:
        yield Space(name, count, parent, sum(n.run for n in numberings(parts, parent)))
    elif len(fans) == 1 and fans != {1}:
        (fan,) = fans
        yield Space(f"{name}.prompts", count // fan, parts=_one_after_the_other(
            [(f.prompt_space, f.count // fan) for f in parts]))
        yield Space(name, count, f"{name}.prompts", fan)
    else:
        yield Space(name, count, parts=_one_after_the_other([(f.row_space, f.count) for f in parts]))


def _one_after_the_other(spaces: Sequence[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """(space, number of its first row) of each space. spaces: (space, number of its rows)."""
    return tuple(zip((s for s, _ in spaces), accumulate((n for _, n in spaces), initial=0), strict=False))


def _fields(flow: FlowBuilder, refs: Sequence[FrameRef], name: str,
            span: Span) -> list[tuple[str, list[Term]]] | Bad:
    """(name, its value in each part) of the named values and number columns that all parts have, each a value of the
    rows or of their tokens."""
    shared = [n for n in (*dict(refs[0].fields), *refs[0].numbers)
              if all(n in (*dict(r.fields), *r.numbers) for r in refs)]
    found: list[tuple[str, list[Term]]] = []
    for field in shared:
        terms = []
        for ref in refs:
            own = dict(ref.fields).get(field)
            terms.append(flow.exprs.number(ref, field, span) if own is None else flow.exprs.field(ref, own, span))
        wide = _alike(flow, refs, terms, field, span)
        if isinstance(wide, Bad):
            return BAD
        found.append((field, [flow.materialize(t, f"{name}.{field}", span) for t in wide]))
    return found


def _alike(flow: FlowBuilder, refs: Sequence[FrameRef], terms: Sequence[Term], field: str,
           span: Span) -> list[Term] | Bad:
    """The values of one name as values of the rows of each part, or of their tokens if one of them is."""
    for other in terms[1:]:
        if (other.dtype == "bool") != (terms[0].dtype == "bool"):
            return flow.errors.add("RL0203", f"`{field}` is a number in one batch and a condition in another", span,
                                   help="for a condition: `where(c, 1, 0)`")
        if (pair := units.clash("where", (const(True, span), terms[0], other))) is not None:
            return units.report(pair, span, flow.errors)
    level: Level = next((x for x in FINE if any(t.level == x for t in terms)), "seq")
    return [t if (t.level, t.space) == (level, flow.spaces.of(r.frame, level))
            else flow.exprs.ops.broadcast(t, level, r.frame) for r, t in zip(refs, terms, strict=True)]
