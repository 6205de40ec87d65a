"""The operators of the language on Terms: level, space and type rules, constant folding.

In: typed arguments. Out: a Term made of exactly the operators of plan/operators.py, or BAD with one message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType

from rldsl.diag import Label
from rldsl.plan.expr import Level, Scalar
from rldsl.plan.operators import BUILTINS, OPERATORS
from rldsl.plan.spaces import IndexedFrame
from rldsl.semantics import row_operators, units
from rldsl.semantics.composites import COMPOSITES
from rldsl.semantics.errors import BAD, Bad, Errors
from rldsl.semantics.levels import FINE, Mismatch, Spaces, depth, source_name
from rldsl.semantics.terms import Term, const, fold
from rldsl.semantics.values import FrameRef, describe, level_value
from rldsl.source import Span

INFIX = {"+": "add", "-": "sub", "*": "mul", "/": "div", "**": "pow", "<": "lt", "<=": "le", ">": "gt", ">=": "ge",
         "==": "eq", "!=": "ne", "and": "and", "or": "or"}


Target = Level | FrameRef  # what a reduction goes to: a level, or the rows of a batch
Options = Mapping[str, Scalar]  # the named arguments of a built-in function: constants
Restrict = Callable[[Term, str], Term]  # (value, space of a selection) -> the value of the selected rows


OF_VOCABULARY = ("sum", "mean", "min", "max", "count", "logsumexp", "std", "var")  # reductions of whole distributions


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
        if not self._types(op, args, span) or not self._check_vocabulary(args):
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
        over a selection of the other's rows. For example, with `kept = gen where r > 0`, a value of `gen` is cut down
        to the rows of `kept` where it meets a value of `kept`."""
        selection = self._selection_above(a, b)
        if selection is not None:
            return _with(args, b, self._on_selection_above(a, b, selection))
        selection = self._selection_over(a, b)
        return None if selection is None else _with(args, a, self.on_selection(a, selection))

    def _selection_above(self, a: Term, b: Term) -> str | None:
        """The space of `a`, or one above it, that is a selection of the space of `b`; None if there is none."""
        spaces = (self.spaces.rows_of(a),) if b.level in FINE else self.spaces.chain(a)
        whole = self.spaces.rows_of(b)
        return next((s for s in spaces if self.spaces.is_selection_of(b.level, s, whole)), None)

    def _on_selection_above(self, a: Term, b: Term, selection: str) -> Term | None:
        """b for the rows of `selection`, which is above `a`. Where no frame has these rows, as those that a selection
        of continuations continues, b for the rows of `a` itself."""
        new = self.on_selection(b, selection)
        if new is None and a.level == "seq":
            return next((self.on_frame(b, f) for f in self.spaces.frames_with_space("seq", a.space)), None)
        return new

    def _selection_over(self, a: Term, b: Term) -> str | None:
        """The selection of the rows of `a` in which every row belongs to an element of `b`: of a frame that was
        selected and that has b's space at b's level. None if there is none."""
        whole, over = self.spaces.rows_of(a), self.spaces.rows_of(b)
        selected = (f for f in self.spaces.frames.values() if f.selected_from and self.spaces.of(f, b.level) == over)
        spaces = (self.spaces.of(f, a.level) for f in selected)
        return next((s for s in spaces if self.spaces.is_selection_of(a.level, s, whole)), None)

    def on_selection(self, x: Term, space: str) -> Term | None:
        """x itself, or its values for the rows of the selection `space`; None where it does not range over them."""
        if x.level == "batch" or self.spaces.rows_of(x) == space:
            return x
        if self.restrict is None or not self.spaces.is_selection_of(x.level, space, self.spaces.rows_of(x)):
            return None
        if not any(f.selected_from and self.spaces.of(f, x.level) == space for f in self.spaces.frames.values()):
            return None  # what the rows of a selection continue has no frame
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

    def _check_vocabulary(self, args: tuple[Term, ...]) -> bool:
        """Whether whole distributions are used only where they exist, in losses; RL0348 where not."""
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
        if not self._check_vocabulary((x,)):
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
        if not self._check_vocabulary((x,)):
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

    def _share(self, share: Term) -> Bad | None:
        """What is wrong with the fraction of a quantile."""
        if share.level != "batch":
            return self.errors.add("RL0201", "the fraction of `quantile` must be a single number", share.at,
                                   f"this is {describe(share)}")
        if share.dtype in ("bool", "text"):
            return self.errors.add("RL0205", "the fraction of `quantile` must be a number", share.at)
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


def _with(args: tuple[Term, ...], old: Term, new: Term | None) -> tuple[Term, ...] | None:
    """`args` with a term replaced; None without a new one."""
    return None if new is None else tuple(new if t is old else t for t in args)
