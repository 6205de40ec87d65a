"""Units of counts: prompts, sequences, pairs and tokens, of a minibatch or of the whole batch.

In: an operator and its arguments. Out: the unit of the result, or the two arguments that do not fit. A value without a
unit ("") fits any. A unit is a word, and inside a loss perhaps "WORD of a minibatch" (counted by the loss) or "WORD of
the whole batch" (counted in the flow and passed as data); the bare word fits both.
"""

from __future__ import annotations

from collections.abc import Sequence

from rldsl.diag import Label
from rldsl.plan.operators import OPERATORS
from rldsl.semantics.errors import Bad, Errors
from rldsl.semantics.terms import Term
from rldsl.source import Span

UNITS = ("prompts", "sequences", "pairs", "tokens")
MINIBATCH, WHOLE = " of a minibatch", " of the whole batch"


def word(unit: str) -> str:
    """prompts, sequences, pairs, tokens or ""."""
    return unit.removesuffix(MINIBATCH).removesuffix(WHOLE)


def differ(a: str, b: str) -> bool:
    """Whether values of these units cannot be added or compared."""
    if not a or not b or a == b:
        return False
    return word(a) != word(b) or (word(a) != a and word(b) != b)


def clash(op: str, args: Sequence[Term]) -> tuple[Term, Term] | None:
    """The two arguments of `op` that cannot meet, if there are any."""
    if len(OPERATORS[op].same_unit) < 2:
        return None
    a, b = (args[i] for i in OPERATORS[op].same_unit)
    return (a, b) if differ(a.unit, b.unit) else None


def result(op: str, args: Sequence[Term]) -> str:
    """The unit of `op(args)`, whose arguments fit: counts stay counts in sums, and times or over a plain number."""
    match OPERATORS[op].unit:
        case "keep":
            return max((args[i].unit for i in OPERATORS[op].same_unit), key=len)  # the most specific
        case "product":
            units = [a.unit for a in args if a.unit]
            return units[0] if len(units) == 1 else ""
        case "quotient":
            return "" if args[1].unit else args[0].unit
        case _:
            return ""


def reduced(op: str, unit: str, counted: str, to_batch: bool, in_loss: bool) -> str:
    """The unit of a reduction. counted: what `count` counts. A loss sees one minibatch, so its totals are of that."""
    rule = OPERATORS[op].unit
    found = counted if rule == "count" else unit if rule == "keep" else ""
    total = op in ("count", "sum") and to_batch and in_loss
    return found + MINIBATCH if total and word(found) == found and found else found


def report(pair: tuple[Term, Term], span: Span, errors: Errors) -> Bad:
    """RL0218 with both places and both units."""
    a, b = pair
    if word(a.unit) == word(b.unit):
        mine, theirs = (a, b) if a.unit.endswith(MINIBATCH) else (b, a)
        help_ = (f"{_quoted(mine)} counts the {word(a.unit)} of one minibatch, {_quoted(theirs)} those of the whole "
                 "batch; compute both in the loss, or both in the flow")
    else:
        help_ = ("use the same unit on both sides; a number without a unit is compatible with any, and a quotient of "
                 "two units is a ratio")
    return errors.add("RL0218", f"{a.unit} and {b.unit} are different units", span, "a number with two units",
                      labels=(Label(a.span, a.unit), Label(b.span, b.unit)), help=help_)


def _quoted(term: Term) -> str:
    text = " ".join(term.span.text.split())
    return f"`{text}`" if len(text) <= 40 else "one"
