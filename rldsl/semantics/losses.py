"""Losses: binding outputs of the model and data, and whether micro-batches add up exactly.

In: a loss with its data arguments and the frames being trained. Out: a Program over inputs named by parameter.
Invariant: either "loss" is affine in batch-level reductions of outputs of the model, so its gradient is a sum over
micro-batches, or `BoundLoss.first_pass` says why it takes all outputs of the minibatch at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from rldsl.diag import Label
from rldsl.plan.expr import Program
from rldsl.plan.heads import LOGPROBS_AT, OUTPUTS, SKIPPED, STOP, UPDATES, Head
from rldsl.plan.operators import OPERATORS
from rldsl.plan.spaces import IndexedFrame
from rldsl.semantics.arguments import accept
from rldsl.semantics.errors import BAD, Bad, Errors
from rldsl.semantics.expressions import ExpressionBuilder
from rldsl.semantics.levels import Spaces, source_name
from rldsl.semantics.scope import Scope
from rldsl.semantics.terms import Term, input_, program, walk
from rldsl.semantics.values import LossUse, describe, level_value
from rldsl.syntax import ast


@dataclass(frozen=True, slots=True)
class BoundLoss:
    """The loss of one train call, as a program whose inputs are bound."""

    program: Program  # as of `plan.model.Plan.programs`
    model_outputs: tuple[tuple[str, str, str], ...]  # (input, frame, name of the output); these have a gradient
    data: tuple[tuple[str, Term], ...]  # (input, argument) of what the program reads; these have none
    metrics: tuple[str, ...]  # besides those that every train call has
    ids: str = ""  # the value with the ids of the tokens at which the output `logprobs_at` is
    first_pass: str = ""  # as of `plan.payloads.TrainSpec`
    whole_prompts: bool = False  # it needs all rows of a prompt in one minibatch


def bind_loss(use: LossUse, head: Head, frames: tuple[IndexedFrame, ...], id_: str,
              exprs: ExpressionBuilder) -> BoundLoss | Bad:
    """The loss of one train call on `frames`: one frame, or the two sides of a pair. id_: of its program."""
    decl, errors = use.ref.decl, exprs.errors
    model_outputs = _bind_model_outputs(decl, head, frames, use, errors)
    args: dict[str, Term] = {}
    for name, term in use.args.items():
        found = (exprs.ops.on_frame(term, f) for f in frames)
        here = next((t for t in found if t is not None), None)
        if here is None:
            errors.add("RL0202", f"`{name}` ranges over {exprs.spaces.shown(term)}, and the loss over "
                       + " and ".join(f"`{source_name(f)}`" for f in frames), use.spans[name],
                       help=f"make it of these sequences: `{exprs.spaces.shown(term).rpartition(' ')[2].strip('`')} = "
                            f"teacher.top({source_name(frames[0])}, k=...)`" if term.level == "entry" else "")
            return BAD
        if here.level == "seq" and here.space not in [f.row_space for f in frames]:
            here = exprs.ops.broadcast(here, "seq", frames[0])  # of the sequences that these continue
        if here.level == "turn":  # a loss computes with tokens and sequences
            here = exprs.ops.broadcast(here, "token", next(f for f in frames if f.id == here.space))
        args[name] = here
    inputs = {name: t if t.constant else input_(name, t.level, t.space, t.span, t.dtype, t.unit)
              for name, t in args.items()}
    data = accept(decl.data, inputs, use.spans, exprs.ops, broadcast=True, frames=frames)
    if isinstance(model_outputs, Bad) or isinstance(data, Bad):
        return BAD
    spaces_of = {f.id: f for f in frames}
    scope = Scope(use.ref.module, names=dict(data))
    entries = ids = ""
    if any(OUTPUTS[output].level == "entry" for _, _, output in model_outputs):
        of_data = _entries_of_data(decl, data, use, exprs)
        if isinstance(of_data, Bad):
            return BAD
        entries = of_data
        ids = entries if exprs.spaces.entries[entries].width else ""
    for name, frame, output in model_outputs:
        level = OUTPUTS[output].level
        space = entries if level == "entry" else exprs.spaces.of(spaces_of[frame], level)
        scope.names[name] = input_(name, level, space, decl.span)
    errors.trail.append(use.span)
    try:
        checked = check_body(decl, scope, {n for n, _, _ in model_outputs}, exprs)
    finally:
        errors.trail.pop()
    if isinstance(checked, Bad):
        return BAD
    outputs, needs = checked
    if entries and not ids and not _within_tokens([t for _, t in outputs], exprs):
        return BAD
    made = program(id_, outputs, str(use.span))
    read = set(made.inputs())
    return BoundLoss(made, model_outputs, tuple((n, t) for n, t in args.items() if n in read),
                   tuple(UPDATES if n == STOP else n for n, _ in outputs[1:]), ids, needs.why, needs.prompts)


def _entries_of_data(decl: ast.LossDecl, data: dict[str, Term], use: LossUse, exprs: ExpressionBuilder) -> str | Bad:
    """The entry space of the data of a loss, which says at which tokens the model in training is asked."""
    given = {p.name.name: data[p.name.name].space for p in decl.data if data[p.name.name].level == "entry"}
    output = next(p for p in decl.model_outputs if p.name.name == LOGPROBS_AT)
    if not given:
        return exprs.errors.add("RL0346", f"nothing says at which tokens `{LOGPROBS_AT}` is", use.span,
                                "this loss has no entry value among its data",
                                labels=(Label(output.span, "needed here"),),
                                help="pass log-probs of the same tokens: declare `teacher: entry` after `;`, and pass "
                                     "`teacher=t.logprobs` with `t = teacher.top(gen, k=64)`")
    if len(set(given.values())) > 1:
        first, *rest = given
        other = next(n for n in rest if given[n] != given[first])
        return exprs.errors.add("RL0346", f"`{first}` and `{other}` are log-probs of different tokens",
                                use.spans[other], f"at {exprs.spaces.shown(data[other])}",
                                labels=(Label(use.spans[first], f"at {exprs.spaces.shown(data[first])}"),),
                                help=f"`{LOGPROBS_AT}` has one set of tokens: ask the other model for the log-probs of "
                                     "these, `model.logprobs_at(gen, t.ids)`")
    return next(iter(given.values()))


def _within_tokens(outputs: list[Term], exprs: ExpressionBuilder) -> bool:
    """Whether arithmetic over the whole vocabulary at a token needs that token alone; else RL0348."""
    every = walk(outputs)
    whole = {id(t) for t in every if exprs.ops.whole(t)}
    after = set(whole)
    for term in every:  # arguments first
        if any(id(a) in after for a in term.args):
            after.add(id(term))
    before = {id(t) for t in walk([t for t in every if id(t) in whole])}
    for term in every:
        if id(term) in before - whole and _of_whole_minibatch(term, exprs.spaces):
            exprs.errors.add("RL0348", "arithmetic over the vocabulary that depends on the whole minibatch", term.at,
                             "the vocabulary is looked at for a few tokens at once", labels=term.origin,
                             help="reduce to tokens first, and combine that with this")
            return False
        between = id(term) in after & before - whole
        reduced = any(id(a) in whole for a in term.args)
        if between and not reduced and (term.level != "token" or OPERATORS[term.op].family != "elementwise"):
            exprs.errors.add("RL0348", "arithmetic over the vocabulary that depends on other tokens", term.at,
                             "the vocabulary is looked at for a few tokens at once", labels=term.origin,
                             help="use values of the token itself there")
            return False
    return True


@dataclass(frozen=True, slots=True)
class MinibatchNeeds:
    """What a loss needs of the whole minibatch at once."""

    why: str = ""  # the first thing that a micro-batch does not know; "": there is none
    prompts: bool = False  # all rows of a prompt in one minibatch


def check_body(decl: ast.LossDecl, scope: Scope, model_outputs: set[str],
               exprs: ExpressionBuilder) -> tuple[list[tuple[str, Term]], MinibatchNeeds] | Bad:
    """Build the body, and find out whether micro-batches add up. The result: ("loss", term), the metrics, then ("stop",
    whether one of the conditions holds) if there are any. model_outputs: inputs with a gradient."""
    before = len(exprs.errors.found)
    exprs.ops.in_loss = True
    result, metrics, stops = exprs.functions.body(decl.body, scope, decl.name.span, "loss")
    stop = _stop(stops, exprs)
    exprs.ops.in_loss = False
    if result is None:
        return BAD
    if len(result) != 1:
        return exprs.errors.add("RL0204", f"a loss returns one value, not {len(result)}", decl.name.span)
    outputs = [("loss", result[0])]
    for ident, term in metrics:
        if ident.name == STOP:
            exprs.errors.add("RL0102", "a metric cannot be named `stop`", ident.span,
                             help="the name is reserved for `stop when`; choose another")
        elif ident.name == SKIPPED:
            exprs.errors.add("RL0102", "a metric cannot be named `skipped`", ident.span,
                             help="the name is reserved for `nonfinite=skip`; choose another")
        elif ident.name in [n for n, _ in outputs] or ident.name in ("grad_norm", "lr", *([UPDATES] if stops else [])):
            also = " and, because of `stop when`, `updates`" if stops else ""
            exprs.errors.add("RL0102", f"`{ident.name}` is defined twice", ident.span,
                             help=f"every train call already has the metrics `loss`, `grad_norm` and `lr`{also}")
        outputs.append((ident.name, term))
    for name, term in outputs:
        if term.level != "batch":
            kind = "loss" if name == "loss" else "metric"
            exprs.errors.add("RL0201", f"a {kind} must be a single number, not {level_value(term.level)}", term.at,
                             f"this is {level_value(term.level)}",
                             help="reduce it over the batch, for example with `mean(x)`")
    outputs += [(STOP, stop)] if stop is not None else []
    needs = _check_outputs(outputs, model_outputs, exprs) if len(exprs.errors.found) == before else \
        MinibatchNeeds()
    return BAD if len(exprs.errors.found) > before else (outputs, needs)


def _stop(conditions: list[Term], exprs: ExpressionBuilder) -> Term | None:
    """Whether one of the conditions of `stop when` holds; None without any, or after an error."""
    found: Term | None = None
    for term in conditions:
        if term.at.text in ("true", "false"):
            exprs.errors.add("RL0203", f"`stop when {term.at.text}` does not depend on the minibatch", term.at,
                             "no minibatch makes an optimizer step" if term.at.text == "true" else "never stops",
                             help="use a comparison, for example `stop when mean(ratio) > 5`")
        elif term.dtype != "bool":
            exprs.errors.add("RL0203", "`stop when` needs a condition", term.at, f"this is {describe(term)}",
                             help="use a comparison, for example `stop when mean(ratio) > 5`")
        elif term.level != "batch":
            level = level_value(term.level)
            exprs.errors.add("RL0201", f"`stop when` needs a single condition per minibatch, not {level}", term.at,
                              f"this is {describe(term)}", help="reduce it first, for example `max(x) > 5`")
        else:
            both = term if found is None else exprs.ops.apply("or", (found, term), term.span)
            found = both if isinstance(both, Term) else found
    return found


def _bind_model_outputs(decl: ast.LossDecl, head: Head, frames: tuple[IndexedFrame, ...], use: LossUse,
                        errors: Errors) -> tuple[tuple[str, str, str], ...] | Bad:
    """(input, frame, name of the output) of each parameter before the `;`."""
    has = {o.name: o.level for o in head.outputs if o.in_loss}
    if not decl.model_outputs:
        return errors.add("RL0204", f"the loss `{decl.name.name}` uses no output of the model", use.span,
                          labels=(Label(decl.span, "declared here"),),
                          help="declare the outputs before `;`, for example `loss f(logprobs: token; adv: token)`")
    if len(frames) == 1:
        pairs = [(p, frames[0], p.name.name) for p in decl.model_outputs]
    elif len(frames) == len(decl.model_outputs):
        pairs = [(p, f, head.main.name) for p, f in zip(decl.model_outputs, frames, strict=True)]
    else:
        return errors.add("RL0204",
                          f"the loss `{decl.name.name}` takes {len(decl.model_outputs)} outputs of the model, but "
                          f"{len(frames)} batches are passed to `train`", use.span,
                          help="with two batches, declare one output for each")
    bad = False
    for param, _, what in pairs:
        declared = param.level.name if param.level else "batch"
        if what not in has:
            errors.add("RL0206", f"a {head.name} has no output `{what}`", use.span, f"required by `{decl.name.name}`",
                       labels=(Label(param.span, "declared here"),), help=f"its outputs: {', '.join(has)}")
            bad = True
        elif declared != has[what]:
            errors.add("RL0201", f"`{what}` of a {head.name} is {level_value(has[what])}, not {level_value(declared)}",
                       param.span, help=f"declare `{param.name.name}: {has[what]}`")
            bad = True
    return BAD if bad else tuple((p.name.name, f.id, what) for p, f, what in pairs)


# ------------------------------------------------------------------------------------------------ exactness

class Dependence(IntEnum):
    """How a value depends on outputs of the model. Ordered: an elementwise result is at least each argument."""

    CONSTANT = 0  # not at all
    PER_ELEMENT = 1  # it does, at a level finer than batch
    AFFINE = 2  # affine in reductions to batch that are sums
    NONLINEAR = 3  # in another way


def _check_outputs(outputs: list[tuple[str, Term]], model_outputs: set[str],
                   exprs: ExpressionBuilder) -> MinibatchNeeds:
    """Report a loss without a gradient and what no loss may contain, and find what cannot be added up over
    micro-batches. Reductions of outputs of the model can be, if they enter finer arithmetic nowhere; the loss must also
    be affine in them."""
    state: dict[int, Dependence] = {}
    needs, errors = _Needs(exprs.spaces), exprs.errors
    in_value = {id(t) for t in walk([outputs[0][1]])}  # the terms of the loss; all others are of metrics and stops
    for term in walk([t for _, t in outputs]):
        below = [state[id(a)] for a in term.args]
        found = _classify(term, below, model_outputs, id(term) in in_value, errors, needs)
        if found is None:
            return needs.found()
        state[id(term)] = found
        if found == Dependence.NONLINEAR and id(term) in in_value and Dependence.NONLINEAR not in below:
            needs.nonlinear.append(term)
    _, loss = outputs[0]
    if state[id(loss)] == Dependence.NONLINEAR:
        needs.add(needs.nonlinear[0], "is not linear in its reductions")
    if state[id(loss)] == Dependence.CONSTANT:
        errors.add("RL0209", "this loss does not depend on the model being trained", loss.span)
    elif not _has_gradient_path(loss, model_outputs):
        errors.add("RL0209", "this loss has no gradient", loss.span,
                   "conditions, counts, ranks and `stop_gradient` have no gradient",
                   help="use an output of the model in arithmetic, for example `mean(adv * logprobs)`")
    return needs.found()


@dataclass(slots=True)
class _Needs:
    """What `_check_outputs` has found so far."""

    spaces: Spaces
    why: str = ""
    prompts: bool = False
    nonlinear: list[Term] = field(default_factory=list)  # terms of the loss, made of terms that are not

    def add(self, term: Term, what: str) -> None:
        self.why = self.why or f"`{_shortened(term.at.text)}` {what} ({term.at})"

    def found(self) -> MinibatchNeeds:
        return MinibatchNeeds(self.why, self.prompts)


def _shortened(text: str, most: int = 48) -> str:
    """A source text on one line, cut to `most` letters."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def _of_whole_minibatch(term: Term, spaces: Spaces) -> bool:
    """Whether an operator looks at more than one sequence."""
    to = dict(term.attrs).get("to")
    return OPERATORS[term.op].family in ("order", "rows") or to == "batch" or \
        to is not None and spaces.beyond_rows(term)


def _has_gradient_path(loss: Term, model_outputs: set[str]) -> bool:
    """Whether the gradient of the loss reaches an output of the model."""
    live: dict[int, bool] = {}
    for term in walk([loss]):
        args = term.args[1:] if term.op == "where" else term.args
        live[id(term)] = term.name in model_outputs if term.op == "input" else \
            OPERATORS[term.op].gradient and any(live[id(a)] for a in args)
    return live[id(loss)]


def _classify(term: Term, below: list[Dependence], model_outputs: set[str], in_value: bool,
              errors: Errors, needs: _Needs) -> Dependence | None:
    """None after an error. below: of its arguments. in_value: the loss itself needs this term, not only a metric."""
    worst = max(below, default=Dependence.CONSTANT)
    if term.op == "input":
        return Dependence.PER_ELEMENT if term.name in model_outputs else Dependence.CONSTANT
    if term.op == "py":
        errors.add("RL0210", "a Python function inside a loss", term.span, help="call it in the flow")
        return None
    if not OPERATORS[term.op].in_loss:
        errors.add("RL0210", f"`{_shortened(term.at.text)}` inside a loss", term.span,
                   "a loss sees minibatches, and this is about the whole batch",
                   help="compute it in the flow and pass the result")
        return None
    if dict(term.attrs).get("to") is not None:
        to = dict(term.attrs)["to"]
        if needs.spaces.beyond_rows(term):
            needs.prompts = True
            needs.add(term, "is about all sequences of a prompt")
            return min(worst, Dependence.PER_ELEMENT)
        if to == "batch" and term.args[0].level == "prompt":
            needs.add(term, "is about prompts, whose sequences may be in several micro-batches")
        if to == "batch" and worst == Dependence.CONSTANT and in_value:
            needs.add(term, "reduces data over the minibatch")
            return Dependence.CONSTANT
        if to == "batch":
            return Dependence.AFFINE if OPERATORS[term.op].combine == "sum" else Dependence.NONLINEAR
        if worst >= Dependence.AFFINE:
            needs.add(term.args[-1], "is known only after the last micro-batch, and is used for single elements")
        return min(worst, Dependence.PER_ELEMENT)
    if OPERATORS[term.op].family == "order":
        within = dict(term.attrs)["within"]
        needs.prompts |= needs.spaces.beyond_rows(term)
        verb = "adds up" if term.op == "across" else "orders"
        needs.add(term, f"{verb} the elements of {'the minibatch' if within == 'batch' else f'each {within}'}")
    if OPERATORS[term.op].family == "rows":
        needs.prompts = True
        needs.add(term, "is about neighbors among the sequences of a prompt")
    if term.level != "batch":
        if worst >= Dependence.AFFINE:
            culprit = next(a for a, b in zip(term.args, below, strict=True) if b >= Dependence.AFFINE)
            needs.add(culprit, "is known only after the last micro-batch, and is used for single elements")
        return min(worst, Dependence.PER_ELEMENT)
    return _batch_level_dependence(term, below, worst)


def _batch_level_dependence(term: Term, below: list[Dependence], worst: Dependence) -> Dependence:
    """Arguments are CONSTANT, AFFINE or NONLINEAR here: outputs of the model are finer than batch, and a reduction
    makes them AFFINE or NONLINEAR."""
    if worst in (Dependence.CONSTANT, Dependence.NONLINEAR):
        return worst
    match term.op:
        case "add" | "sub" | "neg" | "stop_gradient":
            return Dependence.AFFINE
        case "mul":
            return Dependence.AFFINE if below.count(Dependence.AFFINE) == 1 else Dependence.NONLINEAR
        case "div":
            return Dependence.AFFINE if below[1] == Dependence.CONSTANT else Dependence.NONLINEAR
        case "where":
            return Dependence.AFFINE if below[0] == Dependence.CONSTANT else Dependence.NONLINEAR
    return Dependence.NONLINEAR
