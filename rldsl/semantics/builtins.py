"""Calls of what the language has built in: which arguments they take, and which operator they become.

In: a call and its scope. Out: a Meaning; BAD where a message was given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

from rldsl.plan.model import MAX_RANKS
from rldsl.plan.operators import BUILTINS, ORDERS, REDUCTIONS, Builtin
from rldsl.semantics import sequence_functions
from rldsl.semantics.errors import BAD, Bad, suggest
from rldsl.semantics.levels import source_name
from rldsl.semantics.terms import Term
from rldsl.semantics.values import FrameRef, Meaning, MeshValue, Pairs, describe
from rldsl.syntax import ast

if TYPE_CHECKING:
    from rldsl.semantics.expressions import ExpressionBuilder
    from rldsl.semantics.scope import Scope


class Builtins:
    """Calls of built-in functions, and of `mesh`."""

    def __init__(self, exprs: ExpressionBuilder):
        self.exprs, self.errors = exprs, exprs.errors

    def mesh(self, expr: ast.Call, scope: Scope) -> MeshValue | Bad:
        """mesh(a:b), mesh(n0:n1, d0:d1), or mesh(8)."""
        pairs: list[tuple[int, int]] = []
        for arg in expr.args:
            if not isinstance(arg.value, ast.Range):
                return self._size(expr, arg, scope)
            ends = [self.exprs.constant(e, scope) for e in (arg.value.start, arg.value.stop)]
            numbers = [e.value for e in ends if isinstance(e, Term)]
            if len(numbers) < 2:
                return BAD
            a, b = numbers
            if not (type(a) is int and type(b) is int and 0 <= a < b <= MAX_RANKS):
                return self.errors.add("RL0205", "empty or invalid range", arg.value.span,
                                       help=f"`a:b` is a, a+1, ..., b-1 and needs 0 <= a < b <= {MAX_RANKS:_}")
            pairs.append((a, b))
        if len(pairs) not in (1, 2):
            return self.errors.add("RL0204", f"`mesh` takes one or two ranges, not {len(pairs)}", expr.span)
        return MeshValue(pairs[0] if len(pairs) == 2 else None, pairs[-1], expr.span)

    def _size(self, expr: ast.Call, arg: ast.Argument, scope: Scope) -> MeshValue | Bad:
        """mesh(8): 8 ranks, whichever. `mesh(0-4)` is a range with the wrong sign in it, not the number -4."""
        match arg.value:
            case ast.Binary(op="-", left=ast.Number() as start, right=ast.Number() as stop):
                return self.errors.add("RL0203", "`mesh` takes ranges", arg.span, "`-` subtracts",
                                       help=f"write `mesh({start.span.text}:{stop.span.text})`")
        if len(expr.args) != 1 or arg.name is not None:
            return self.errors.add("RL0203", "`mesh` takes ranges, or a number of ranks", arg.span,
                                   help="write `mesh(0:8)`, or `mesh(8)` for any 8 ranks, chosen by the compiler")
        size = self.exprs.constant(arg.value, scope)
        if isinstance(size, Bad):
            return BAD
        if type(size.value) is not int or size.unit.word or not 1 <= size.value <= MAX_RANKS:
            return self.errors.add("RL0205", "`mesh` takes ranges, or a number of ranks", arg.span,
                                   f"must be 1 to {MAX_RANKS:_}",
                                   help="write `mesh(0:8)`, or `mesh(8)` for any 8 ranks, chosen by the compiler")
        return MeshValue(None, (0, size.value), expr.span, free=True)

    def call(self, name: str, expr: ast.Call, scope: Scope) -> Meaning:
        """A call of a built-in function, by position and with its options, which are constants."""
        builtin = BUILTINS[name]
        if builtin.form == "frames":
            return self._frames(builtin, expr, scope)
        args: list[Meaning] = []
        options: dict[str, Term | Bad] = {}
        for arg in expr.args:
            if arg.name is None:
                args.append(self.exprs.build(arg.value, scope))
            elif arg.name.name in builtin.options:
                options[arg.name.name] = self.exprs.constant(arg.value, scope)
            else:
                return self.errors.add("RL0107", f"`{name}` has no argument `{arg.name.name}`", arg.name.span)
        if not self._counted(builtin, len(args), expr):
            return BAD
        if any(isinstance(a, Bad) for a in (*args, *options.values())):
            return BAD
        reducing = builtin.form == "reduction" or builtin.form == "either" and len(args) == 1
        siblings, ordering = builtin.by_prompt and expr.by is not None, builtin.form == "order"
        if expr.by is not None and not reducing and not siblings and not ordering:
            return self.errors.add("RL0107", f"`{name}` does not take `by` here", expr.by.span,
                                   help=f"only reductions and orders take `by`: {', '.join(REDUCTIONS + ORDERS)}")
        if name == "len" and isinstance(args[0], FrameRef) and args[0].contents == "prompts":
            return self.errors.add("RL0213", "`len` counts response tokens", expr.args[0].span,
                                   f"`{source_name(args[0].frame)}` contains only prompts",
                                   help="generate responses first, or load answers")
        if builtin.form == "sequence":
            by = self.exprs.target(expr.by, scope) if expr.by is not None else None
            if siblings and by is None:
                return BAD
            return sequence_functions.call(self.exprs.ops, name, args, expr.span, by)
        if name == "count" and isinstance(args[0], FrameRef | Pairs):  # the number of rows that have a length
            rows = args[0].chosen if isinstance(args[0], Pairs) else args[0]
            args = [sequence_functions.call(self.exprs.ops, "len", [rows], expr.span)]
        given = [a for a in expr.args if a.name is None]
        for value, tree in zip(args, given, strict=True):
            if not isinstance(value, Term):
                return self.errors.add("RL0203", f"`{name}` needs values, not {describe(value)}", tree.span,
                                       help="use one of its fields, for example `.logprobs`"
                                       if isinstance(value, FrameRef) and value.contents == "generated" else "")
        terms = cast(tuple[Term, ...], tuple(args))
        if builtin.form == "special":
            return SPECIAL[name](self, terms, expr)
        if ordering:
            within = self.exprs.target(expr.by, scope) if expr.by else "batch"
            return BAD if within is None else self.exprs.ops.order(name, terms[0], within, expr.span)
        if reducing:
            to = self.exprs.target(expr.by, scope) if expr.by else "batch"
            constants = {n: o.value for n, o in options.items() if isinstance(o, Term)}
            return BAD if to is None else self.exprs.ops.reduce(name, terms[0], to, expr.span, constants, terms[1:])
        return self.exprs.ops.apply(name, terms, expr.span)

    def _counted(self, builtin: Builtin, given: int, expr: ast.Call) -> bool:
        """Whether a call has as many positional arguments as it may; else a message says how many."""
        least, most = builtin.min_args, builtin.max_args
        if least <= given <= most:
            return True
        wanted = (str(least) if least == most else f"{least} or {most}" if most == least + 1 else
                  f"at least {least}" if given < least else f"at most {most}")
        self.errors.add("RL0204", f"`{builtin.name}` takes {wanted} argument{'s' if wanted != '1' else ''}, "
                        f"not {given}", expr.func.span)
        return False

    def _frames(self, builtin: Builtin, expr: ast.Call, scope: Scope) -> Meaning:
        """A function that makes sequences, which only the flow can do."""
        named = next((a.name for a in expr.args if a.name is not None and a.name.name not in builtin.options), None)
        if named is not None:
            return self.errors.add("RL0107", f"`{builtin.name}` has no argument `{named.name}`", named.span)
        if expr.by is not None:
            return self.errors.add("RL0107", f"`{builtin.name}` does not take `by` here", expr.by.span,
                                   help=f"only reductions take `by`: {', '.join(REDUCTIONS)}")
        if not self._counted(builtin, sum(a.name is None for a in expr.args), expr):
            return BAD
        if self.exprs.frames is None or self.exprs.functions.active:
            return self.errors.add("RL0212", f"`{builtin.name}` outside the flow", expr.span,
                                   "functions and losses work on values",
                                   help="make the sequences in the flow, and pass their values as arguments")
        return self.exprs.frames(builtin.name, expr, scope)

    def clip(self, terms: tuple[Term, ...], expr: ast.Call) -> Term | Bad:
        """clip(x, low, high): min(max(x, low), high)."""
        x, low, high = terms
        above = self.exprs.ops.apply("max", (x, low), expr.span)
        return BAD if isinstance(above, Bad) else self.exprs.ops.apply("min", (above, high), expr.span)

    def uniform(self, terms: tuple[Term, ...], expr: ast.Call) -> Term | Bad:
        return self.exprs.ops.uniform(terms[0], expr.span)

    def step_number(self, terms: tuple[Term, ...], expr: ast.Call) -> Term | Bad:
        return Term("step", (), "batch", "", "f32", expr.span)

    def choice(self, terms: tuple[Term, ...], expr: ast.Call) -> Term | Bad:
        """choice(word, "a", "b"): the word, which must be one of the others; known at compile time."""
        wrong = next((t for t in terms if not (t.constant and t.dtype == "text")), None)
        if wrong is not None:
            return self.errors.add("RL0211", "`choice` needs strings known at compile time", wrong.span,
                                   f"this is {describe(wrong)}")
        words = [str(t.value) for t in terms[1:]]
        if terms[0].value in words:
            return terms[0]
        near = suggest(str(terms[0].value), words)
        return self.errors.add("RL0205", f"\"{terms[0].value}\" is not a valid choice", terms[0].span,
                               help=near if near.startswith("did") else f"one of: {', '.join(words)}")


# What lowers the built-in functions that are neither one operator for each element, nor a reduction, nor a sequence
# function: (arguments, call) -> result.
SPECIAL: Mapping[str, Callable[[Builtins, tuple[Term, ...], ast.Call], Term | Bad]] = {
    "clip": Builtins.clip, "choice": Builtins.choice, "uniform": Builtins.uniform,
    "step_number": Builtins.step_number,
}
if wrong := {b.name for b in BUILTINS.values() if b.form == "special"} ^ SPECIAL.keys():
    raise TypeError(f"the built-in functions of the form \"special\" are those in SPECIAL: {', '.join(sorted(wrong))}")
