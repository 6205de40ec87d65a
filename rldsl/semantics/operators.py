"""The operators of the language on Terms: level, space and type rules, constant folding.

In: typed arguments. Out: a Term made of exactly the operators of plan/operators.py, or BAD with one message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from rldsl.diag import Label, internal_error
from rldsl.plan.expr import Level, Scalar
from rldsl.plan.operators import BUILTINS, OPERATORS
from rldsl.plan.spaces import IndexedFrame
from rldsl.semantics import row_operators, units
from rldsl.semantics.errors import BAD, Bad, Errors
from rldsl.semantics.levels import FINE, Mismatch, Spaces, depth, source_name
from rldsl.semantics.terms import Term, const, fold
from rldsl.semantics.values import FrameRef, Meaning, describe, level_value
from rldsl.source import Span

INFIX = {"+": "add", "-": "sub", "*": "mul", "/": "div", "**": "pow", "<": "lt", "<=": "le", ">": "gt", ">=": "ge",
         "==": "eq", "!=": "ne", "and": "and", "or": "or"}


Target = Level | FrameRef  # what a reduction goes to: a level, or the rows of a batch
Options = Mapping[str, Scalar]  # the named arguments of a built-in function: constants
Restrict = Callable[[Term, str], Term]  # (value, space of a selection) -> the value of the selected rows


OF_VOCABULARY = ("sum", "mean", "min", "max", "count", "logsumexp", "std", "var")  # reductions of whole distributions
OF_TURNS = ("next", "prev", "cumsum", "discount")  # sequence functions that turns have, too


class Operators:
    """Builds terms over the frames of `spaces`."""

    def __init__(self, spaces: Spaces, errors: Errors):
        self.spaces = spaces
        self.errors = errors
        self.restrict: Restrict | None = None  # set by the flow, where selections are made
        self.in_loss = False  # whether what is built belongs to a loss, which sees one minibatch
        self.prefixes: dict[str, str] = {}  # frame of prefixes, or a selection of it -> the sequences that were cut
        self.statement = ""  # the name of the flow's statement being built, which random numbers follow
        self._draws: Counter[str] = Counter()  # statement -> calls of `uniform` so far

    def cuts_of(self, frame: IndexedFrame) -> str:
        """The frame whose responses were cut to make `frame`, or what it was selected from; "": none."""
        while frame.id not in self.prefixes and frame.selected_from:
            frame = self.spaces.frames[frame.selected_from]
        return self.prefixes.get(frame.id, "")

    # ------------------------------------------------------------------------------------------ elementwise

    def apply(self, op: str, args: tuple[Term, ...], span: Span) -> Term | Bad:
        """An elementwise operator, with broadcasting and folding."""
        if not self._types(op, args, span) or not self._in_a_loss(args):
            return BAD
        clash = units.clash(op, args)
        if clash is not None:
            return units.report(clash, span, self.errors)
        unit = units.result(op, args)
        if all(a.constant for a in args):
            try:
                return const(fold(op, args), span, unit)
            except (ArithmeticError, ValueError) as error:
                return self.errors.add("RL0214", "this constant cannot be evaluated", span, str(error))
        joined = self.spaces.join(args)
        while isinstance(joined, Mismatch):
            restricted = self._restricted(args, joined.a, joined.b)
            if restricted is None:
                return self._mixed(joined, span)
            args = restricted
            joined = self.spaces.join(args)
        level, space = joined
        if op == "where" and args[0].constant:
            chosen = args[1] if args[0].value else args[2]
            if (chosen.level, chosen.space) == (level, space):
                return chosen
        kept = OPERATORS[op].keeps_truth and all(a.dtype == "bool" for a in args[-2:])  # else 1 or 0
        dtype = "bool" if OPERATORS[op].condition or kept else "f32"
        return Term(op, args, level, space, dtype, span, unit=unit)

    def _restricted(self, args: tuple[Term, ...], a: Term, b: Term) -> tuple[Term, ...] | None:
        """`args` with one of a and b restricted to the selection that the other ranges over; None if neither ranges
        over a selection of the other's rows."""
        mine, theirs = map(self.spaces.rows_of, (a, b))
        above = (mine,) if b.level in FINE else self.spaces.chain(a)
        meeting = next((s for s in above if self.spaces.is_selection_of(b.level, s, theirs)), None)
        if meeting is not None:
            old, new = b, self.on_selection(b, meeting)
            if new is None and a.level == "seq":
                new = next((self.on_frame(b, f) for f in self.spaces.frames_with_space("seq", a.space)), None)
        else:
            chosen = next((f for f in self.spaces.frames.values()
                           if f.selected_from and self.spaces.of(f, b.level) == theirs
                           and self.spaces.is_selection_of(a.level, self.spaces.of(f, a.level), mine)), None)
            if chosen is None:
                return None
            old, new = a, self.on_selection(a, self.spaces.of(chosen, a.level))
        return None if new is None else tuple(new if t is old else t for t in args)

    def on_selection(self, x: Term, space: str) -> Term | None:
        """x itself, or its values for the rows of the selection `space`; None where it does not range over them."""
        if x.level == "batch" or self.spaces.rows_of(x) == space:
            return x
        if self.restrict is None or not self.spaces.is_selection_of(x.level, space, self.spaces.rows_of(x)):
            return None
        if not any(f.selected_from and self.spaces.of(f, x.level) == space for f in self.spaces.frames.values()):
            return None  # what the rows of a selection continue has no frame of its own
        return self.restrict(x, space)

    def on_frame(self, x: Term, frame: IndexedFrame) -> Term | None:
        """x itself if each row of `frame` belongs to one of its elements; else its values for the rows of the
        selection that they belong to; None where there is no such."""
        if x.level == "batch" or x.level in FINE:
            return self.on_selection(x, frame.id)
        if any(s.id == x.space for s in frame.chain):
            return x
        found = (self.on_selection(x, s.id) for s in frame.chain)
        here = next((t for t in found if t is not None), None)
        if here is not None or not frame.selected_from:
            return here
        source = self.spaces.frames[frame.selected_from]  # of which each row has a value, though x has coarser ones
        wide = self.on_frame(x, source)
        return None if wide is None else self.on_selection(self.broadcast(wide, "seq", source), frame.row_space)

    def _types(self, op: str, args: tuple[Term, ...], span: Span) -> bool:
        for arg in args:
            if arg.dtype == "id":
                self._no_ids(arg)
                return False
            if arg.dtype == "text" and not (op in ("add", "eq", "ne") and all(a.dtype == "text" for a in args)):
                self.errors.add("RL0203", "arithmetic on a string", arg.at, "this is a string")
                return False
        kinds = [a.dtype == "bool" for a in args]
        if op in ("and", "or", "not") and not all(kinds) or op == "where" and not kinds[0]:
            wrong = args[kinds.index(False)]
            word = "where" if op == "where" else op
            self.errors.add("RL0203", f"`{word}` needs a condition", wrong.at, "this is a number",
                            help="use a comparison, for example `x > 0`")
            return False
        if op not in ("and", "or", "not", "where", "eq", "ne") and kinds and all(kinds):
            self.errors.add("RL0203", "arithmetic on conditions", span, "these are true or false",
                            help="convert a condition to a number with `where(c, 1, 0)`")
            return False
        return True

    def whole(self, x: Term) -> bool:
        """Whether it ranges over the whole vocabulary at each token."""
        return x.level == "entry" and not self.spaces.entries[x.space].width

    def _in_a_loss(self, args: tuple[Term, ...]) -> bool:
        """Whether whole distributions are used where they exist; else RL0348."""
        x = next((a for a in args if self.whole(a)), None)
        if x is None or self.in_loss:
            return True
        self.errors.add("RL0348", "a whole distribution is used outside a loss", x.at, "it has no table of numbers",
                        labels=x.origin, help="pass it to a loss as it is; for a metric, `top` gives numbers: "
                                              "`t = teacher.top(gen, k=64)`")
        return False

    def _no_ids(self, x: Term) -> Bad:
        return self.errors.add("RL0345", "arithmetic on the ids of tokens", x.at,
                               "these say which tokens, not how much", labels=x.origin,
                               help="use their log-probs: `.logprobs`, or those of another model: "
                                    "`model.logprobs_at(gen, t.ids)`")

    def _mixed(self, mismatch: Mismatch, span: Span) -> Bad:
        a, b = mismatch.a, mismatch.b
        help_ = "reduce both to a level that they share, for example with `sum(x by seq)` or `mean(x)`"
        carried = self.spaces.carried(a), self.spaces.carried(b)
        if any(carried) and not all(carried):
            name = next(filter(None, carried))
            help_ = f"the prompts of `{name}` are those of several steps: a column of their data is `{name}.COLUMN`"
        return self.errors.add(
            "RL0202", f"values of {self.spaces.shown(a)} and {self.spaces.shown(b)} cannot be combined", span,
            "these are values of different batches",
            labels=(Label(a.at, f"{a.level} value of {self.spaces.shown(a)}"),
                    Label(b.at, f"{b.level} value of {self.spaces.shown(b)}")),
            help=help_)

    # ------------------------------------------------------------------------------------------- reductions

    def reduce(self, name: str, x: Term, to: Target, span: Span,
               options: Options = MappingProxyType({}), more: tuple[Term, ...] = ()) -> Term | Bad:
        """`name(x by to, OPTION=...)`. more: the share of a quantile."""
        if x.dtype == "id":
            return self._no_ids(x)
        if more and (fault := self._share(more[0])) is not None:
            return fault
        if not self._in_a_loss((x,)):
            return BAD
        if self.whole(x) and (to != "token" or name not in OF_VOCABULARY):
            return self.errors.add("RL0348", "what ranges over the whole vocabulary must be reduced to tokens first",
                                   span, f"this is {describe(x)} of {self.spaces.shown(x)}",
                                   help=f"for example `sum(x by token)`; reductions: {', '.join(OF_VOCABULARY)}")
        if isinstance(to, FrameRef):
            fault = self._loss_has_no_rows(to, span) or row_operators.check_above(self, x, to)
            if fault is not None:
                return fault
        elif to == "prompt" and depth(x.level) > depth(to) and (fault := self._no_prompts(x)) is not None:
            return fault
        elif depth(to) >= depth(x.level):
            what = "a constant" if x.constant else level_value(x.level)
            return self.errors.add("RL0208", f"{what} cannot be reduced with `{name}` by {to}", x.at,
                                   f"it has no level finer than {to}",
                                   help="a reduction goes from a finer level to a coarser one; from coarse to fine: "
                                        "batch, prompt, seq, turn, token, entry")
        elif to == "turn" and (fault := self._no_turns(x, span)) is not None:
            return fault
        if name in COMPOSITES:
            return COMPOSITES[name](self, x, to, span, options)
        op = BUILTINS[name].operator
        unit = units.reduced(op, x.unit, self.spaces.counted(x), to == "batch", self.in_loss)
        if unit.minibatch != 0 and unit.whole != 0:
            return units.report_sum(x, span, self.errors)
        if isinstance(to, FrameRef):
            made, space = row_operators.level_of_rows(to), to.frame.row_space
        else:
            space = self.spaces.coarser(x.level, x.space, to)
            made = self.spaces.level_of(to, space)
        return Term(op, (x, *more), made, space, "f32", span, (("to", made),), unit=unit)

    def order(self, name: str, x: Term, within: Target, span: Span) -> Term | Bad:
        """`sort(x by within)` or `rank(x by within)`: of the level of x."""
        if x.dtype == "id":
            return self._no_ids(x)
        if not self._in_a_loss((x,)):
            return BAD
        if self.whole(x):
            return self.errors.add("RL0348", "what ranges over the whole vocabulary must be reduced to tokens first",
                                   span, f"this is {describe(x)} of {self.spaces.shown(x)}",
                                   help="order the values of tokens, or take the most likely ones with `top`")
        if isinstance(within, FrameRef):
            return self.errors.add("RL0208", f"`{name}` by the rows of a batch", span,
                                   help=f"order within a level: `{name}(x by prompt)`")
        if name == "across" and (x.level, within) != ("token", "prompt"):
            return self.errors.add("RL0208", "`across` adds up tokens of the responses to a prompt", span,
                                   f"this is {describe(x)}, {'without `by`' if within == 'batch' else f'by {within}'}",
                                   help="pass a token value and `by prompt`: `across(x by prompt)`")
        if depth(within) >= depth(x.level):
            what = "a constant" if x.constant else level_value(x.level)
            return self.errors.add("RL0208", f"{what} has no order by {within}", x.at, f"this is {describe(x)}",
                                   labels=x.origin, help="order a finer value within a coarser level, for example "
                                   f"`{name}(x)` or `{name}(x by prompt)`")
        fault = self._no_prompts(x) if within == "prompt" else self._no_turns(x, span) if within == "turn" else None
        if fault is not None:
            return fault
        op = OPERATORS[BUILTINS[name].operator]
        of = self.spaces.coarser(x.level, x.space, within)
        return Term(op.name, (x,), x.level, x.space, "f32", span,
                    (("within", self.spaces.level_of(within, of) if within == "prompt" else within), ("of", of)),
                    unit=units.result(op.name, (x,)))

    def _no_turns(self, x: Term, span: Span) -> Bad | None:
        """Why a token value has no turns; None where it has."""
        if self.in_loss:
            return self.errors.add("RL0210", "a reduction by turn inside a loss", span,
                                   "a loss computes with values of tokens and of sequences",
                                   help="compute it in the flow and pass the result as a token value: "
                                        "`per_token(x, gen.logprobs)`")
        frame = self.spaces.frames[self.spaces.frame_of(x)]
        return None if frame.max_turns else self.errors.add(
            "RL0201", f"`{source_name(frame)}` has no turns", x.at, "each of its sequences is one response",
            labels=x.origin, help="reduce `by seq`; turns come from `generate` with `env=`")

    def _no_prompts(self, x: Term) -> Bad | None:
        """RL0201 for `x by prompt` where rows of several batches have no prompts in common."""
        fans = self.spaces.ungrouped_by(self.spaces.chain(x)[0])
        return None if not fans else self.errors.add(
            "RL0201", f"values of {self.spaces.shown(x)} cannot be reduced by prompt", x.at,
            f"it has rows of batches with {fans} sequences for each prompt", labels=x.origin,
            help="reduce before `concat`, and name the result: `gen with m=mean(r by prompt)`, then `.m` of all rows")

    def _loss_has_no_rows(self, to: FrameRef, span: Span) -> Bad | None:
        if not self.in_loss:
            return None
        return self.errors.add("RL0210", f"a reduction by `{source_name(to.frame)}` inside a loss", span,
                               "a loss reduces by sequence and by prompt",
                               help="where its sequences continue these rows, write `by prompt`; else compute it in "
                                    "the flow and pass the result")

    def std(self, x: Term, to: Target, span: Span, options: Options) -> Term | Bad:
        """The square root of `var`. Options: unbiased. In a loss its gradient is 0 where all elements are equal, as in
        torch, and not that of a square root, which is infinite."""
        var = self._variance(x, to, span, bool(options.get("unbiased", True)))
        if self.in_loss and isinstance(var, Term):
            differ = self.apply("gt", (var, const(0.0, span)), span)
            safe = BAD if isinstance(differ, Bad) else self.apply("where", (differ, var, const(1.0, span)), span)
            root = BAD if isinstance(safe, Bad) else self.apply("sqrt", (safe,), span)
            made = BAD if isinstance(differ, Bad) or isinstance(root, Bad) else self.apply(
                "where", (differ, root, const(0.0, span)), span)
        else:
            made = BAD if isinstance(var, Bad) else self.apply("sqrt", (var,), span)
        return BAD if isinstance(made, Bad) else replace(made, unit=replace(x.unit, word=""))

    def var(self, x: Term, to: Target, span: Span, options: Options) -> Term | Bad:
        """Options: unbiased (divides by count - 1; the default) or not (divides by count)."""
        made = self._variance(x, to, span, bool(options.get("unbiased", True)))
        return BAD if isinstance(made, Bad) else replace(made, unit=units.squared(x.unit))

    def logsumexp(self, x: Term, to: Target, span: Span, options: Options) -> Term | Bad:
        """log(sum(exp(x - m))) + m, where m is the largest element, as a constant."""
        x = replace(x, unit=units.PLAIN)
        largest = self.reduce("max", x, to, span)
        shift = BAD if isinstance(largest, Bad) else self.apply("stop_gradient", (largest,), span)
        shifted = BAD if isinstance(shift, Bad) else self.apply("sub", (x, shift), span)
        each = BAD if isinstance(shifted, Bad) else self.apply("exp", (shifted,), span)
        total = BAD if isinstance(each, Bad) else self.reduce("sum", replace(each, unit=units.PLAIN), to, span)
        made = BAD if isinstance(total, Bad) else self.apply("log", (total,), span)
        if isinstance(made, Bad) or isinstance(shift, Bad):
            return BAD
        return self.apply("add", (made, shift), span)

    def _variance(self, x: Term, to: Target, span: Span, unbiased: bool) -> Term | Bad:
        """sum((x-mean)^2) / max(count-1, 1), or over the count; without a unit.

        In a loss, the mean over the minibatch is known only after its last micro-batch, so there the numerator is
        sum(x^2) - mean * sum(x)."""
        def go(op: str, *args: Term | Bad) -> Term | Bad:
            terms = tuple(a for a in args if isinstance(a, Term))
            return self.apply(op, terms, span) if len(terms) == len(args) else BAD

        x = replace(x, unit=units.PLAIN)
        mean, count = self.reduce("mean", x, to, span), self.reduce("count", x, to, span)
        one, zero = const(1.0, span), const(0.0, span)
        over_minibatch = self.in_loss and to == "batch"
        if over_minibatch and x.dtype == "bool":
            square: Term | Bad = go("where", x, one, zero)
        else:
            centered = x if over_minibatch else go("sub", x, mean)
            square = go("mul", centered, centered)
        if isinstance(square, Bad):
            return BAD
        total = self.reduce("sum", square, to, span)
        if over_minibatch:  # rounding may leave a little less than 0
            total = go("max", go("sub", total, go("mul", mean, self.reduce("sum", x, to, span))), zero)
        number = go("max", go("sub", count, one), one) if unbiased else go("max", count, one)
        return go("div", total, number)

    def rest(self, logprobs: Term, span: Span) -> Term | Bad:
        """The probability of all tokens but those whose log-probs are given: a token value."""
        made: Term | Bad = self.apply("exp", (logprobs,), span)
        made = self.reduce("sum", made, "token", span) if isinstance(made, Term) else BAD
        made = self.apply("sub", (const(1.0, span), made), span) if isinstance(made, Term) else BAD
        return self.apply("max", (made, const(0.0, span)), span) if isinstance(made, Term) else BAD

    def _share(self, share: Term) -> Bad | None:
        """What is wrong with the fraction of a quantile."""
        if share.level != "batch":
            return self.errors.add("RL0201", "the fraction of `quantile` must be a single number", share.at,
                                   f"this is {describe(share)}")
        if share.constant and not 0 <= float(share.value) <= 1:
            return self.errors.add("RL0205", "the fraction of `quantile` must be between 0 and 1", share.at)
        return None

    def uniform(self, x: Term, span: Span) -> Term | Bad:
        """A random number for each element of x; each call of the program has its own."""
        if x.level == "batch":
            return self.errors.add("RL0201", "`uniform` needs a value with several elements",
                                   x.at, f"this is {describe(x)}",
                                   help="it draws a random number for each prompt, sequence or token of its argument")
        self._draws[self.statement] += 1
        number = self._draws[self.statement]
        call = f"{self.statement or 'uniform'}{f'#{number}' if number > 1 else ''}"
        frame = (("frame", self.spaces.frame_of(x)),) if x.level in FINE else ()
        return Term("uniform", (), x.level, x.space, "f32", span, (("call", call), *frame))

    # -------------------------------------------------------------------------------------------- sequences

    def sequence(self, name: str, args: list[Meaning], span: Span, by: Target | None = None) -> Term | Bad:
        """A call of a sequence function. by: over the sequences of a prompt, instead of tokens."""
        if name == "len":
            ref = args[0]
            if not isinstance(ref, FrameRef):
                return self._kind("len", "sequences, such as a generated batch", ref, span)
            return Term("len", (), "seq", ref.frame.row_space, "f32", span, (("frame", ref.frame.id),),
                        unit=units.Unit("tokens"))
        x = args[0]
        if not isinstance(x, Term):
            return self._kind(name, "a value", x, span)
        if by is not None:
            return row_operators.siblings(self, name, x, args[1:], by, span)
        if name == "at_end":
            return self._at_end(x, args[1:], span)
        if name == "along":
            return row_operators.along(self, x, args[1], span)
        if name == "over":
            return self._over(x, args[1], args[2:], span)
        if x.level == "turn" and name in OF_TURNS:
            return self._of_turns(name, x, args[1:], span)
        if x.level != "token":
            return self.errors.add("RL0201", f"`{name}` needs a token value", x.at, f"this is {describe(x)}",
                                   labels=x.origin, help="`at_end(x)` puts a seq value at the last token"
                                   if x.level == "seq" else "")
        if name == "discount":
            g = args[1]
            if not isinstance(g, Term):
                return self._kind("discount", "a number as its second argument", g, span)
            if g.dtype == "text":
                return self._kind("discount", "a number as its second argument", g, span)
            pair = units.clash("discount", (x, g))
            if pair is not None:
                return units.report(pair, span, self.errors)
            if g.level != "batch":
                return self._discount_by(x, g, span)
            return Term("discount", (x, g), "token", x.space, "f32", span, unit=units.result("discount", (x, g)))
        if name == "last":
            return Term("last", (x,), "seq", self.spaces.coarser("token", x.space, "seq"), x.dtype, span, unit=x.unit)
        op = OPERATORS[BUILTINS[name].operator]
        if (op.takes, op.gives) != (("token",), "token"):
            raise internal_error(f"no rule lowers the sequence function {name}")
        return Term(op.name, (x,), "token", x.space, "f32" if name == "cumsum" else x.dtype, span, unit=x.unit)

    def _of_turns(self, name: str, x: Term, rest: list[Meaning], span: Span) -> Term | Bad:
        """A sequence function over the turns of each conversation, instead of its tokens."""
        args: tuple[Term, ...] = (x,)
        if name == "discount":
            g = rest[0]
            if not isinstance(g, Term):
                return self._kind("discount", "a number as its second argument", g, span)
            if g.level != "batch" or g.dtype == "text":
                return self.errors.add("RL0201", "the factor of `discount` over turns must be one number", g.at,
                                       f"this is {describe(g)}")
            if (pair := units.clash("discount", (x, g))) is not None:
                return units.report(pair, span, self.errors)
            args += (g,)
        op = BUILTINS[name].operator
        return Term(op, args, "turn", x.space, "f32" if name in ("cumsum", "discount") else x.dtype, span, unit=x.unit)

    def _discount_by(self, x: Term, g: Term, span: Span) -> Term | Bad:
        """`discount(x, g)` with a factor for each token; a coarser one is repeated over the tokens of x."""
        if g.level != "token":
            (frame,) = self.spaces.frames_with_space("token", x.space)
            repeated = self.apply("add", (g, self.zeros("token", frame, span)), span)
            if isinstance(repeated, Bad):
                return BAD
            g = repeated
        if g.space != x.space:
            return self.errors.add("RL0202", "the factor of `discount` belongs to other tokens", g.at,
                                   f"it belongs to {self.spaces.shown(g)}, and the value to {self.spaces.shown(x)}")
        return Term("discount_by", (x, g), "token", x.space, "f32", span, unit=units.result("discount", (x, g)))

    def _at_end(self, x: Term, rest: list[Meaning], span: Span) -> Term | Bad:
        if x.level != "seq":
            return self.errors.add("RL0201", "`at_end` needs a seq value", x.at, f"this is {describe(x)}",
                                   labels=x.origin)
        frames = self.spaces.with_responses("seq", x.space)
        if rest:
            if not isinstance(rest[0], FrameRef):
                return self._kind("at_end", "sequences as its second argument", rest[0], span)
            frame = rest[0].frame
            of_cuts = None if frame.max_response_tokens else row_operators.at_end_of_cuts(self, x, frame, span)
            if of_cuts is not None:
                return of_cuts
            here = self.on_frame(x, frame) if frame.max_response_tokens else None
            if here is None:
                what = "tokens of" if frame.max_response_tokens else "the sequences that were cut into"
                return self.errors.add("RL0202", f"this seq value does not belong to {what} `{source_name(frame)}`",
                                       x.at, f"it belongs to {self.spaces.shown(x)}")
            own = here.space == frame.row_space  # else of what these sequences continue
            x, frames = here if own else self.broadcast(here, "seq", frame), (frame,)
        if len(frames) != 1:
            shown = [source_name(f) for f in self.spaces.with_responses("seq", x.space)]
            return self.errors.add("RL0202", f"`at_end` is ambiguous: {', '.join(f'`{n}`' for n in shown)}", span,
                                   help=f"specify the sequences: `at_end(x, {shown[0]})`")
        return Term("at_end", (x,), "token", frames[0].id, x.dtype, span, (("frame", frames[0].id),), unit=x.unit)

    def _over(self, x: Term, ref: Meaning, default: list[Meaning], span: Span) -> Term | Bad:
        """The values of x for the rows of a selection; with a default, those of a selection for all rows."""
        if not isinstance(ref, FrameRef):
            return self._kind("over", "sequences as its second argument", ref, span)
        if default:
            return row_operators.over_all(self, x, ref, default[0], span)
        here = self.on_frame(x, ref.frame)
        if here is None or x.level == "batch":
            name = source_name(ref.frame)
            return self.errors.add("RL0202", f"this {x.level} value does not belong to `{name}`", x.at,
                                   f"it belongs to {self.spaces.shown(x)}",
                                   help=f"`over(x, {name})` takes a value of the batch from which `{name}` was "
                                        "selected")
        return here

    def _kind(self, name: str, wanted: str, got: Meaning, span: Span) -> Bad:
        if isinstance(got, Bad):
            return BAD
        return self.errors.add("RL0203", f"`{name}` needs {wanted}", span, f"given {describe(got)}")

    # -------------------------------------------------------------------------------------------- broadcast

    def broadcast(self, x: Term, level: Level, frame: IndexedFrame) -> Term:
        """x, repeated to `level` over `frame`: x + 0 of that level, since the plan has no operator that only
        broadcasts."""
        zero = self.zeros(level, frame, x.span)
        if x.dtype == "bool":
            never = Term("lt", (zero, const(0.0, x.span)), zero.level, zero.space, "bool", x.span)
            return Term("or", (x, never), zero.level, zero.space, "bool", x.span)
        return Term("add", (x, zero), zero.level, zero.space, "f32", x.span, unit=x.unit)

    def zeros(self, level: Level, frame: IndexedFrame, span: Span) -> Term:
        """0 for each element of a level over `frame`."""
        length = Term("len", (), "seq", frame.row_space, "f32", span, (("frame", frame.id),))
        seq = Term("mul", (length, const(0.0, span)), "seq", frame.row_space, "f32", span)
        if level in ("turn", "token"):
            token = Term("at_end", (seq,), "token", frame.id, "f32", span, (("frame", frame.id),))
            if level == "token":
                return token
            return Term("sum", (token,), "turn", frame.id, "f32", span, (("to", "turn"),))
        if level == "prompt":
            made = self.spaces.level_of("prompt", frame.prompt_space)
            return Term("sum", (seq,), made, frame.prompt_space, "f32", span, (("to", made),))
        return seq


# Reductions that several operators compute: (operators, value, level, span, options) -> result. A new one also needs
# a decision about its unit. Only these can have options (named arguments).
COMPOSITES: Mapping[str, Callable[[Operators, Term, Target, Span, Options], Term | Bad]] = {
    "std": Operators.std, "var": Operators.var, "logsumexp": Operators.logsumexp,
}
if wrong := {b.name for b in BUILTINS.values() if b.form == "reduction" and not b.operator} ^ COMPOSITES.keys():
    raise TypeError(f"reductions without an operator are those in COMPOSITES: {', '.join(sorted(wrong))}")
if wrong := {b.name for b in BUILTINS.values() if b.options and b.form != "frames"} - COMPOSITES.keys():
    raise TypeError(f"only reductions in COMPOSITES read options, and these declare some: {', '.join(sorted(wrong))}")
