"""Built-in functions that several operators compute: reductions such as `std`, and the rest of a distribution.

In: typed arguments and the `Operators` that builds terms. Out: a Term, or BAD after a message of an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from rldsl.plan.operators import BUILTINS
from rldsl.semantics import units
from rldsl.semantics.errors import BAD, Bad
from rldsl.semantics.terms import Term, const
from rldsl.source import Span

if TYPE_CHECKING:
    from rldsl.semantics.operators import Operators, Options, Target


def std(ops: Operators, x: Term, to: Target, span: Span, options: Options) -> Term | Bad:
    """The square root of `var`. Options: unbiased. In a loss its gradient is 0 where all elements are equal, as in
    torch, and not that of a square root, which is infinite."""
    variance = _variance(ops, x, to, span, options)
    if ops.in_loss and isinstance(variance, Term):
        differ = ops.apply("gt", (variance, const(0.0, span)), span)
        safe = BAD if isinstance(differ, Bad) else ops.apply("where", (differ, variance, const(1.0, span)), span)
        root = BAD if isinstance(safe, Bad) else ops.apply("sqrt", (safe,), span)
        made = BAD if isinstance(differ, Bad) or isinstance(root, Bad) else ops.apply(
            "where", (differ, root, const(0.0, span)), span)
    else:
        made = BAD if isinstance(variance, Bad) else ops.apply("sqrt", (variance,), span)
    return BAD if isinstance(made, Bad) else replace(made, unit=replace(x.unit, word=""))


def var(ops: Operators, x: Term, to: Target, span: Span, options: Options) -> Term | Bad:
    """Options: unbiased (divides by count - 1; the default) or not (divides by count)."""
    made = _variance(ops, x, to, span, options)
    return BAD if isinstance(made, Bad) else replace(made, unit=units.squared(x.unit))


def logsumexp(ops: Operators, x: Term, to: Target, span: Span, options: Options) -> Term | Bad:
    """log(sum(exp(x - m))) + m, where m is the largest element, as a constant."""
    x = replace(x, unit=units.PLAIN)
    largest = ops.reduce("max", x, to, span)
    shift = BAD if isinstance(largest, Bad) else ops.apply("stop_gradient", (largest,), span)
    shifted = BAD if isinstance(shift, Bad) else ops.apply("sub", (x, shift), span)
    each = BAD if isinstance(shifted, Bad) else ops.apply("exp", (shifted,), span)
    total = BAD if isinstance(each, Bad) else ops.reduce("sum", replace(each, unit=units.PLAIN), to, span)
    made = BAD if isinstance(total, Bad) else ops.apply("log", (total,), span)
    if isinstance(made, Bad) or isinstance(shift, Bad):
        return BAD
    return ops.apply("add", (made, shift), span)


def _variance(ops: Operators, x: Term, to: Target, span: Span, options: Options) -> Term | Bad:
    """sum((x-mean)^2) / max(count-1, 1), or over the count; without a unit. Errors: RL0205 where the option
    `unbiased` is neither true nor false.

    In a loss, the mean over the minibatch is known only after its last micro-batch, so there the numerator is
    sum(x^2) - mean * sum(x)."""
    def go(op: str, *args: Term | Bad) -> Term | Bad:
        terms = tuple(a for a in args if isinstance(a, Term))
        return ops.apply(op, terms, span) if len(terms) == len(args) else BAD

    unbiased = options.get("unbiased", True)
    if not isinstance(unbiased, bool):
        return ops.errors.add("RL0205", "`unbiased` must be true or false", span,
                              help="write `unbiased=true` to divide by n - 1, or `unbiased=false` to divide by n")
    x = replace(x, unit=units.PLAIN)
    mean, count = ops.reduce("mean", x, to, span), ops.reduce("count", x, to, span)
    one, zero = const(1.0, span), const(0.0, span)
    over_minibatch = ops.in_loss and to == "batch"
    if over_minibatch and x.dtype == "bool":
        square: Term | Bad = go("where", x, one, zero)
    else:
        centered = x if over_minibatch else go("sub", x, mean)
        square = go("mul", centered, centered)
    if isinstance(square, Bad):
        return BAD
    total = ops.reduce("sum", square, to, span)
    if over_minibatch:  # rounding may leave a little less than 0
        total = go("max", go("sub", total, go("mul", mean, ops.reduce("sum", x, to, span))), zero)
    number = go("max", go("sub", count, one), one) if unbiased else go("max", count, one)
    return go("div", total, number)


def rest(ops: Operators, logprobs: Term, span: Span) -> Term | Bad:
    """The probability of all tokens but those whose log-probs are given: a token value."""
    made: Term | Bad = ops.apply("exp", (logprobs,), span)
    made = ops.reduce("sum", made, "token", span) if isinstance(made, Term) else BAD
    made = ops.apply("sub", (const(1.0, span), made), span) if isinstance(made, Term) else BAD
    return ops.apply("max", (made, const(0.0, span)), span) if isinstance(made, Term) else BAD


# Reductions that several operators compute: (operators, value, level, span, options) -> result. A new one also needs
# a decision about its unit. Only these can have options (named arguments).
COMPOSITES: Mapping[str, Callable[[Operators, Term, Target, Span, Options], Term | Bad]] = {
    "std": std, "var": var, "logsumexp": logsumexp,
}
if wrong := {b.name for b in BUILTINS.values() if b.form == "reduction" and not b.operator} ^ COMPOSITES.keys():
    raise TypeError(f"reductions without an operator are those in COMPOSITES: {', '.join(sorted(wrong))}")
if wrong := {b.name for b in BUILTINS.values() if b.options and b.form != "frames"} - COMPOSITES.keys():
    raise TypeError(f"only reductions in COMPOSITES read options, and these declare some: {', '.join(sorted(wrong))}")
