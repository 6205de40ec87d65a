"""Operators that relate rows to other rows: siblings, the rows of a frame above, selections, prefixes.

In: typed arguments and the `Operators` that builds terms. Out: a Term of an operator of the family "rows", or a
reduction to the rows of a frame; BAD with one message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rldsl.plan.expr import Level
from rldsl.plan.spaces import IndexedFrame
from rldsl.semantics import units
from rldsl.semantics.errors import BAD, Bad
from rldsl.semantics.levels import source_name
from rldsl.semantics.terms import Term
from rldsl.semantics.values import FrameRef, Meaning, describe
from rldsl.source import Span

if TYPE_CHECKING:
    from rldsl.semantics.operators import Operators

SIBLINGS = {"next": "next_row", "prev": "prev_row", "cumsum": "cumsum_rows", "discount": "discount_rows",
            "last": "last_row", "at_end": "at_last_row"}


def level_of_rows(ref: FrameRef) -> Level:
    """The level of the values that the rows of these sequences have."""
    return "prompt" if ref.contents == "prompts" and len(ref.frame.chain) == 1 else "seq"


def check_above(ops: Operators, x: Term, ref: FrameRef) -> Bad | None:
    """RL0208 or RL0202 where `x by gen` goes nowhere: x must be finer than the rows of `gen`."""
    name, space = source_name(ref.frame), ref.frame.row_space
    if x.level == "batch" or x.space == space:
        what = "a constant" if x.constant else "one number of the whole batch" if x.level == "batch" else \
            f"a value of `{name}`"
        return ops.errors.add("RL0208", f"{what} cannot be reduced by `{name}`", x.at, "it has no finer level",
                              help=f"reduce values of the tokens of `{name}`, or of what was made from its rows")
    chain = ops.spaces.chain(x)
    above = chain[0 if x.level in ("turn", "token") else 1:]
    if any(s == space or ops.spaces.is_selection_of("seq", s, space) for s in above):
        return None
    return ops.errors.add("RL0202", f"this {x.level} value does not lie below the rows of `{name}`", x.at,
                          f"it belongs to {ops.spaces.shown(x)}",
                          help=f"`by {name}` takes values of what was generated or cut from `{name}`")


def siblings(ops: Operators, name: str, x: Term, rest: list[Meaning], to: FrameRef | Level, span: Span) -> Term | Bad:
    """`next(x by prompt)` and its like: over the rows of one prompt, which may be a row of another frame."""
    if x.level != "seq":
        return ops.errors.add("RL0201", f"`{name}(x by prompt)` needs a seq value", x.at, f"this is {describe(x)}",
                              labels=x.origin, help="without `by prompt` it works over tokens"
                              if x.level == "token" else "")
    frames = ops.spaces.frames_with_space("seq", x.space)
    frame = next((f for f in frames if len(f.chain) > 1), None)
    if frame is None:
        return ops.errors.add("RL0202", f"{ops.spaces.shown(x)} has one sequence for each prompt", x.at,
                              "there are no others", help="generate several for each prompt, `n=4`, or cut responses: "
                              "`prefixes(gen, every=16)`")
    if to != "prompt" and not (isinstance(to, FrameRef) and to.frame.row_space == frame.prompt_space):
        given = source_name(to.frame) if isinstance(to, FrameRef) else to
        return ops.errors.add("RL0201", f"`{name}` works over the sequences of a prompt", span,
                              f"`{given}` is not what the rows of `{source_name(frame)}` belong to",
                              help=f"write `{name}(... by prompt)`")
    op = SIBLINGS[name]
    if name == "discount":
        g = rest[0]
        if not isinstance(g, Term) or g.level != "batch":
            return BAD if isinstance(g, Bad) else ops.errors.add(
                "RL0201", "the factor of `discount` must be one number", span, f"this is {describe(g)}")
        pair = units.clash("discount", (x, g))
        return units.report(pair, span, ops.errors) if pair is not None else \
            Term(op, (x, g), "seq", x.space, "f32", span, unit=x.unit)
    if rest:
        return ops.errors.add("RL0204", f"`{name}(x by prompt)` takes one argument, not {1 + len(rest)}", span)
    if name == "last":
        made = ops.spaces.level_of("prompt", frame.prompt_space)
        return Term(op, (x,), made, frame.prompt_space, x.dtype, span, unit=x.unit)
    return Term(op, (x,), "seq", x.space, "f32" if name == "cumsum" else x.dtype, span, unit=x.unit)


def at_end_of_cuts(ops: Operators, x: Term, frame: IndexedFrame, span: Span) -> Term | None:
    """`at_end(s, cuts)`: s at the last prompt of each row that `cuts` were made from; None where s is of others."""
    here = ops.on_frame(x, frame)
    if here is None or here.level == "token" or len(frame.chain) == 1:
        return None
    wide = here if here.space == frame.row_space else ops.broadcast(here, "seq", frame)
    return Term("at_last_row", (wide,), "seq", frame.row_space, wide.dtype, span, unit=x.unit)


def over_all(ops: Operators, x: Term, ref: FrameRef, default: Meaning, span: Span) -> Term | Bad:
    """`over(x, gen, y)`: a value of a selection as a value of all rows."""
    name, frame = source_name(ref.frame), ref.frame
    if not isinstance(default, Term) or default.level != "batch" or default.dtype == "text":
        return BAD if isinstance(default, Bad) else ops.errors.add(
            "RL0203", "the third argument of `over` must be one number", span, f"this is {describe(default)}",
            help="it is what rows get that were not selected, for example 0")
    if x.level in ("turn", "token"):
        return ops.errors.add("RL0201", "`over(x, gen, y)` needs a value of sequences or prompts", x.at,
                              f"this is {describe(x)}", labels=x.origin,
                              help="reduce it first, for example `mean(x by seq)`")
    if x.level == "batch" or not ops.spaces.is_selection_of(x.level, x.space, frame.row_space):
        return ops.errors.add("RL0202", f"this {x.level} value does not belong to a selection of `{name}`", x.at,
                              f"it belongs to {ops.spaces.shown(x)}",
                              help=f"`over(x, {name}, y)` takes values of `kept`, where `kept = {name} where ...`")
    if (x.dtype == "bool") != (default.dtype == "bool"):
        return ops.errors.add("RL0203", "`over` with a condition and a number", span,
                              help="both must be numbers, or both conditions")
    return Term("over", (x, default), x.level, frame.row_space, x.dtype, span, unit=x.unit)


def along(ops: Operators, x: Term, ref: Meaning, span: Span) -> Term | Bad:
    """`along(v, gen)`: v of prefixes of the responses of `gen`, as a token value of `gen`."""
    if not isinstance(ref, FrameRef):
        return BAD if isinstance(ref, Bad) else ops.errors.add(
            "RL0203", "`along` needs sequences as its second argument", span, f"given {describe(ref)}")
    name, frame = source_name(ref.frame), ref.frame
    found = next((f for f in ops.spaces.frames_with_space("seq", x.space) if ops.cuts_of(f)), None) \
        if x.level == "seq" else None
    if found is None:
        return ops.errors.add("RL0201", "`along` needs a value of prefixes", x.at, f"this is {describe(x)}",
                              labels=x.origin, help=f"for example `cuts = prefixes({name}, every=16)`, "
                              "`tails = actor.generate(cuts, n=9)`, then `along(mean(x by prompt), "
                              f"{name})` with a seq value x of `tails`")
    if ops.cuts_of(found) != frame.id:
        return ops.errors.add("RL0202", f"these are prefixes of `{source_name(ops.spaces.frames[ops.cuts_of(found)])}`"
                              f", not of `{name}`", x.at,
                              help="pass the sequences that were cut")
    if x.dtype == "bool":
        return ops.errors.add("RL0203", "`along` with conditions", x.at, "these are true or false",
                              help="convert a condition to a number with `where(c, 1, 0)`")
    made = found
    while made.id not in ops.prefixes:  # a selection of prefixes
        made = ops.spaces.frames[made.selected_from]
    at = ops.on_selection(cut_length(ops, made, frame, span), x.space)
    if at is None:
        return ops.errors.add("RL0202", "this value belongs to no prefixes that have positions", x.at)
    return Term("along", (x, at), "token", frame.id, "f32", span,
                (("frame", frame.id),), unit=x.unit)


def cut_length(ops: Operators, cuts: IndexedFrame, source: IndexedFrame, span: Span) -> Term:
    """How many tokens of the response of `source` each prefix has."""
    def prompt_tokens(f: IndexedFrame) -> Term:
        return Term("prompt_len", (), "seq", f.row_space, "f32", span, (("frame", f.id),))

    return Term("sub", (prompt_tokens(cuts), prompt_tokens(source)), "seq", cuts.row_space, "f32", span,
                unit=units.Unit("tokens"))
