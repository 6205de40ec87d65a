"""Sequence functions: what relates the tokens or turns of a sequence to each other, and values to their last tokens.

In: typed arguments and the `Operators` that builds terms. Out: a Term of an operator of the family "sequence", or BAD
with one message. By the sequences of a prompt they are in `row_operators.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rldsl.diag import internal_error
from rldsl.plan.operators import BUILTINS, OPERATORS
from rldsl.semantics import row_operators, units
from rldsl.semantics.errors import BAD, Bad
from rldsl.semantics.levels import source_name
from rldsl.semantics.terms import Term
from rldsl.semantics.values import FrameRef, Meaning, describe
from rldsl.source import Span

if TYPE_CHECKING:
    from rldsl.semantics.operators import Operators, Target

OF_TURNS = ("next", "prev", "cumsum", "discount")  # that turns have, too


def call(ops: Operators, name: str, args: list[Meaning], span: Span, by: Target | None = None) -> Term | Bad:
    """A call of a sequence function. by: over the sequences of a prompt, instead of tokens."""
    if name == "len":
        ref = args[0]
        if not isinstance(ref, FrameRef):
            return _kind(ops, "len", "sequences, such as a generated batch", ref, span)
        return Term("len", (), "seq", ref.frame.row_space, "f32", span, (("frame", ref.frame.id),),
                    unit=units.Unit("tokens"))
    x = args[0]
    if not isinstance(x, Term):
        return _kind(ops, name, "a value", x, span)
    if by is not None:
        return row_operators.siblings(ops, name, x, args[1:], by, span)
    if name == "at_end":
        return _at_end(ops, x, args[1:], span)
    if name == "along":
        return row_operators.along(ops, x, args[1], span)
    if name == "over":
        return _over(ops, x, args[1], args[2:], span)
    if x.level == "turn" and name in OF_TURNS:
        return _of_turns(ops, name, x, args[1:], span)
    if x.level != "token":
        return ops.errors.add("RL0201", f"`{name}` needs a token value", x.at, f"this is {describe(x)}",
                              labels=x.origin, help="`at_end(x)` puts a seq value at the last token"
                              if x.level == "seq" else "")
    if name == "discount":
        g = args[1]
        if not isinstance(g, Term) or g.dtype == "text":
            return _kind(ops, "discount", "a number as its second argument", g, span)
        pair = units.clash("discount", (x, g))
        if pair is not None:
            return units.report(pair, span, ops.errors)
        if g.level != "batch":
            return _discount_by(ops, x, g, span)
        return Term("discount", (x, g), "token", x.space, "f32", span, unit=units.result("discount", (x, g)))
    if name == "last":
        return Term("last", (x,), "seq", ops.spaces.coarser("token", x.space, "seq"), x.dtype, span, unit=x.unit)
    op = OPERATORS[BUILTINS[name].operator]
    if (op.takes, op.gives) != (("token",), "token"):
        raise internal_error(f"no rule lowers the sequence function {name}")
    return Term(op.name, (x,), "token", x.space, "f32" if name == "cumsum" else x.dtype, span, unit=x.unit)


def _of_turns(ops: Operators, name: str, x: Term, rest: list[Meaning], span: Span) -> Term | Bad:
    """A sequence function over the turns of each conversation, instead of its tokens."""
    args: tuple[Term, ...] = (x,)
    if name == "discount":
        g = rest[0]
        if not isinstance(g, Term):
            return _kind(ops, "discount", "a number as its second argument", g, span)
        if g.level != "batch" or g.dtype == "text":
            return ops.errors.add("RL0201", "the factor of `discount` over turns must be one number", g.at,
                                  f"this is {describe(g)}")
        if (pair := units.clash("discount", (x, g))) is not None:
            return units.report(pair, span, ops.errors)
        args += (g,)
    op = BUILTINS[name].operator
    return Term(op, args, "turn", x.space, "f32" if name in ("cumsum", "discount") else x.dtype, span, unit=x.unit)


def _discount_by(ops: Operators, x: Term, g: Term, span: Span) -> Term | Bad:
    """`discount(x, g)` with a factor for each token; a coarser one is repeated over the tokens of x."""
    if g.level != "token":
        (frame,) = ops.spaces.frames_with_space("token", x.space)
        repeated = ops.apply("add", (g, ops.zeros("token", frame, span)), span)
        if isinstance(repeated, Bad):
            return BAD
        g = repeated
    if g.space != x.space:
        return ops.errors.add("RL0202", "the factor of `discount` belongs to other tokens", g.at,
                              f"it belongs to {ops.spaces.shown(g)}, and the value to {ops.spaces.shown(x)}")
    return Term("discount_by", (x, g), "token", x.space, "f32", span, unit=units.result("discount", (x, g)))


def _at_end(ops: Operators, x: Term, rest: list[Meaning], span: Span) -> Term | Bad:
    if x.level != "seq":
        return ops.errors.add("RL0201", "`at_end` needs a seq value", x.at, f"this is {describe(x)}",
                              labels=x.origin)
    frames = ops.spaces.with_responses("seq", x.space)
    if rest:
        if not isinstance(rest[0], FrameRef):
            return _kind(ops, "at_end", "sequences as its second argument", rest[0], span)
        frame = rest[0].frame
        of_cuts = None if frame.max_response_tokens else row_operators.at_end_of_cuts(ops, x, frame, span)
        if of_cuts is not None:
            return of_cuts
        here = ops.on_frame(x, frame) if frame.max_response_tokens else None
        if here is None:
            what = "tokens of" if frame.max_response_tokens else "the sequences that were cut into"
            return ops.errors.add("RL0202", f"this seq value does not belong to {what} `{source_name(frame)}`",
                                  x.at, f"it belongs to {ops.spaces.shown(x)}")
        own = here.space == frame.row_space  # else of what these sequences continue
        x, frames = here if own else ops.broadcast(here, "seq", frame), (frame,)
    if len(frames) != 1:
        shown = [source_name(f) for f in ops.spaces.with_responses("seq", x.space)]
        return ops.errors.add("RL0202", f"`at_end` is ambiguous: {', '.join(f'`{n}`' for n in shown)}", span,
                              help=f"specify the sequences: `at_end(x, {shown[0]})`")
    return Term("at_end", (x,), "token", frames[0].id, x.dtype, span, (("frame", frames[0].id),), unit=x.unit)


def _over(ops: Operators, x: Term, ref: Meaning, default: list[Meaning], span: Span) -> Term | Bad:
    """The values of x for the rows of a selection; with a default, those of a selection for all rows."""
    if not isinstance(ref, FrameRef):
        return _kind(ops, "over", "sequences as its second argument", ref, span)
    if default:
        return row_operators.over_all(ops, x, ref, default[0], span)
    here = ops.on_frame(x, ref.frame)
    if here is None or x.level == "batch":
        name = source_name(ref.frame)
        return ops.errors.add("RL0202", f"this {x.level} value does not belong to `{name}`", x.at,
                              f"it belongs to {ops.spaces.shown(x)}",
                              help=f"`over(x, {name})` takes a value of the batch from which `{name}` was "
                                    "selected")
    return here


def _kind(ops: Operators, name: str, wanted: str, got: Meaning, span: Span) -> Bad:
    if isinstance(got, Bad):
        return BAD
    return ops.errors.add("RL0203", f"`{name}` needs {wanted}", span, f"given {describe(got)}")
