"""Units of counts, and how totals grow with the rows that they cover.

In: an operator and its arguments. Out: the unit of the result, or the two arguments that do not fit. Two things are
known of a value: what it counts (prompts, sequences, pairs, tokens, or nothing), and how it scales. A sum or count over
the batch grows with its number of rows: in the flow with those of the whole batch, in a loss with those of a minibatch.
A mean does not grow, and neither does the quotient of two totals of the same rows.
Invariant: a value that scales with a minibatch never meets one that scales with the whole batch, in any operator: their
quotient would be divided once more by the number of minibatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rldsl.diag import Label
from rldsl.plan.operators import OPERATORS
from rldsl.semantics.errors import Bad, Errors
from rldsl.source import Span

if TYPE_CHECKING:
    from rldsl.semantics.terms import Term

UNITS = ("prompts", "sequences", "pairs", "tokens")
# The power of a number of rows that a value is proportional to: 0 for a mean, 1 for a sum or count, -1 for the inverse
# of one. None: of no single power, like the sum of a mean and a count.
Power = float | None


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of a value."""

    word: str = ""  # one of UNITS; "" fits any
    minibatch: Power = 0.0  # how it scales with the rows of a minibatch
    whole: Power = 0.0  # how it scales with the rows of the whole batch

    def shown(self, scoped: bool) -> str:
        """For messages: "tokens", or with `scoped`, where both occur, "tokens of a minibatch"."""
        scope = " of a minibatch" if self.minibatch != 0 else " of the whole batch" if self.whole != 0 else ""
        return f"{self.word or 'a total'}{scope}" if scoped and scope else self.word


PLAIN = Unit()


def differ(a: str, b: str) -> bool:
    """Whether values of these two units (words of UNITS, or "") cannot be added or compared."""
    return bool(a and b and a != b)


def clash(op: str, args: Sequence[Term]) -> tuple[Term, Term] | None:
    """The two arguments of `op` that cannot meet, if there are any."""
    same = OPERATORS[op].same_unit
    if len(same) == 2 and differ(args[same[0]].unit.word, args[same[1]].unit.word):
        return args[same[0]], args[same[1]]
    mine = [a for a in args if a.unit.minibatch != 0]
    theirs = [a for a in args if a.unit.whole != 0]
    if not (mine and theirs):
        return None
    return (mine[0], theirs[0]) if args.index(mine[0]) < args.index(theirs[0]) else (theirs[0], mine[0])


def result(op: str, args: Sequence[Term]) -> Unit:
    """The unit of `op(args)`, whose arguments fit: counts stay counts in sums, and times or over a plain number."""
    units = [a.unit for a in args]
    match OPERATORS[op].unit:
        case "keep":
            word = next((units[i].word for i in OPERATORS[op].same_unit if units[i].word), "")
        case "product":
            words = [u.word for u in units if u.word]
            word = words[0] if len(words) == 1 else ""
        case "quotient":
            word = "" if units[1].word else units[0].word
        case _:
            word = ""
    return Unit(word, _power(op, args, [u.minibatch for u in units]), _power(op, args, [u.whole for u in units]))


def _power(op: str, args: Sequence[Term], powers: Sequence[Power]) -> Power:
    """How `op(args)` scales, given how its arguments do."""
    known = [p for p in powers if p is not None]
    if OPERATORS[op].condition or len(known) == len(powers) and not any(known):
        return 0.0
    same = [powers[i] for i in OPERATORS[op].same_unit if not args[i].constant]  # a constant fits any number
    if same:
        return same[0] if all(p == same[0] for p in same) else None
    if len(known) < len(powers):
        return None
    match op:
        case "mul":
            return known[0] + known[1]
        case "div":
            return known[0] - known[1]
        case "sqrt":
            return known[0] / 2
        case "pow" if args[1].constant:
            return known[0] * float(args[1].value)
    return None


def reduced(op: str, unit: Unit, counted: str, to_batch: bool, in_loss: bool) -> Unit:
    """The unit of a reduction of a value in `unit`. counted: what `count` counts. A loss sees one minibatch, so its
    totals are of that."""
    rule = OPERATORS[op].unit
    of = replace(PLAIN, word=counted) if rule == "count" else replace(unit, word=unit.word if rule == "keep" else "")
    if op not in ("count", "sum") or not to_batch:
        return of
    if in_loss:
        return replace(of, minibatch=None if of.minibatch is None else of.minibatch + 1)
    return replace(of, whole=None if of.whole is None else of.whole + 1)


def squared(unit: Unit) -> Unit:
    """The unit of a variance of values in `unit`: in no word, as counts squared are no counts."""
    return Unit("", *(None if p is None else 2 * p for p in (unit.minibatch, unit.whole)))


def report(pair: tuple[Term, Term], span: Span, errors: Errors) -> Bad:
    """RL0218 with both places and both units."""
    a, b = pair
    if not differ(a.unit.word, b.unit.word):
        mine, theirs = (a, b) if a.unit.minibatch != 0 else (b, a)
        help_ = (f"{_quoted(mine)} grows with the rows of one minibatch, {_quoted(theirs)} with those of the whole "
                 f"batch, so the result would change with `minibatches`; {ADVICE}")
    else:
        help_ = ("use the same unit on both sides; a number without a unit is compatible with any, and a quotient of "
                 "two units is a ratio")
    one, other = (t.unit.shown(a.unit.minibatch != 0 or b.unit.minibatch != 0) for t in pair)
    return errors.add("RL0218", f"{one} and {other} are different units", span, "a number with two units",
                      labels=(Label(a.span, one), Label(b.span, other)), help=help_)


ADVICE = ("use `mean(x)`, which divides by what the minibatch has, and pass ratios from the flow, for example "
          "`w / mean(w)` as weights")


def report_sum(x: Term, span: Span, errors: Errors) -> Bad:
    """RL0218 for a sum over a minibatch of values that scale with the whole batch."""
    return errors.add("RL0218", "a sum over a minibatch of values that scale with the whole batch", span,
                      "a total of a minibatch",
                      labels=(Label(x.span, "proportional to a size of the whole batch, or to its inverse"),),
                      help=f"the result would change with `minibatches`; {ADVICE}")


def _quoted(term: Term) -> str:
    text = " ".join(term.span.text.split())
    return f"`{text}`" if len(text) <= 40 else "one side"
