"""`train` calls of the flow: the loss that they are given, the batches, the learning rate.

In: a call whose model and batches are known. Out: a Train node, the program of its loss, and the metrics of both.
Errors: RL0111, RL0201, RL0202, RL0203, RL0204, RL0205, RL0207, RL0212, RL0213, RL0215, each with its position.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from math import inf
from typing import TYPE_CHECKING, NamedTuple, cast

from rldsl.graph import model as g
from rldsl.graph.minibatch import Minibatches, minibatches, whole_prompts
from rldsl.plan.heads import SKIPPED
from rldsl.plan.metrics_file import BUILT_IN, METRICS
from rldsl.semantics import options
from rldsl.semantics.errors import BAD, NO_VALUE, Bad
from rldsl.semantics.levels import source_name
from rldsl.semantics.losses import bind_loss
from rldsl.semantics.scope import Scope
from rldsl.semantics.values import FrameRef, LossRef, LossUse, Meaning, ModelRef, describe
from rldsl.source import Span
from rldsl.syntax import ast

if TYPE_CHECKING:
    from rldsl.graph.calls import CallsOfFlow


class _CheckedCall(NamedTuple):
    """A `train` call without mistakes but those of its loss and its learning rate."""

    owner: ModelRef  # the model
    call: ast.Call  # as it is written
    refs: list[FrameRef]  # its one or two batches
    scope: Scope  # of names in its arguments
    clause: g.Clause | None  # where it runs
    span: Span  # of the statement
    given: Mapping[str, options.Value]  # its options
    loss: LossUse  # what is minimized
    parts: Minibatches  # how the rows are divided


class TrainCalls:
    """Makes the nodes of `train` calls, and counts them."""

    def __init__(self, calls: CallsOfFlow):
        self.calls, self.flow, self.errors = calls, calls.flow, calls.errors
        self._trains: Counter[str] = Counter()  # model -> `train` calls so far

    def train(self, owner: ModelRef, call: ast.Call, refs: list[FrameRef], scope: Scope, target: str | None,
               clause: g.Clause | None, span: Span) -> Meaning:
        given = self.calls.options_of(options.TRAIN, call, "train", scope, skip=("loss", "lr"))
        losses = [a for a in call.args if a.name is not None and a.name.name == "loss"]
        if not losses:
            return self.errors.add("RL0215", "`train` needs a loss", cast(ast.Attribute, call.func).name.span,
                                   help="write `loss=ppo_clip(...)`")
        use = self.flow.exprs.build(losses[0].value, scope)
        if not isinstance(use, (LossUse, Bad)):
            help_ = "call it: `loss=name(...)`" if isinstance(use, LossRef) else \
                "declare it with `loss` instead of `fn`"
            return self.errors.add("RL0203", f"`loss` must be a loss, not {describe(use)}", losses[0].value.span,
                                   help=help_)
        if (fault := self._cannot_train(owner, call, refs)) is not None:
            return fault
        if isinstance(use, Bad) or isinstance(given, Bad):
            return BAD
        if (fault := self._trained_rows(call, refs)) is not None:
            return fault
        parts = minibatches(call, given, refs[0], self.flow.exprs, scope)
        if isinstance(parts, Bad):
            return BAD
        if target is not None:
            return self.errors.add("RL0212", "`train` returns nothing", span, help="remove the name before `=`")
        return self._add(_CheckedCall(owner, call, refs, scope, clause, span, given, use, parts))

    def _cannot_train(self, owner: ModelRef, call: ast.Call, refs: list[FrameRef]) -> Bad | None:
        """What is wrong with the model, or with the number of batches; None: nothing."""
        if not owner.trainable:
            word = cast(ast.Attribute, call.func).name.span
            return self.errors.add("RL0207", f"the model `{owner.name}` is frozen", word,
                                   "only a model with an optimizer can be trained", labels=self.calls.declared(owner),
                                   help=f"declare it with an optimizer: `model {owner.name} = ... train adamw(lr=...)`")
        if len(refs) not in (1, 2):
            return self.errors.add("RL0204",
                                   f"`train` takes one batch, or the two sides of a pair, not {len(refs)} batches",
                                   call.span)
        return None

    def _add(self, c: _CheckedCall) -> Meaning:
        """Bind the loss, and add the node with its metrics to the flow."""
        name = c.owner.name
        node = self.flow.unique(f"{name}.train")
        number = self._trains[name]
        self._trains[name] += 1
        frames = tuple(r.frame for r in c.refs)
        made = bind_loss(c.loss, c.owner.head, frames, f"{node}/{c.loss.ref.decl.name.name}", self.flow.exprs)
        if isinstance(made, Bad) or made.whole_prompts and not whole_prompts(
                c.call, c.parts.count, c.refs[0], made.first_pass, self.flow.exprs):
            return BAD
        most = c.parts.most(frames, made.whole_prompts)
        data = tuple((n, self.flow.materialize(t, "expr", c.loss.spans[n]).name) for n, t in made.data)
        made_by = self.flow.distributions
        heads = tuple((v, made_by[v]) for v in dict.fromkeys(v for _, v in data) if v in made_by)
        rate = self._rate(c.call, c.scope)
        if isinstance(rate, Bad):
            return BAD
        skips = c.given["nonfinite"] == "skip"
        outputs = self._outputs(node, ("loss", "grad_norm", "lr", *made.metrics, *([SKIPPED] if skips else [])), c.span)
        if isinstance(outputs, Bad):
            return BAD
        self.flow.programs.append(made.program)
        reads = dict.fromkeys([*(f"{f.id}.tokens" for f in frames), *(v for _, v in data),
                               *filter(None, (rate, made.ids))])
        self.flow.items.append(g.Train(
            id=node, reads=tuple(reads), writes=tuple(v for _, v in outputs), span=c.span, clause=c.clause,
            model=name, frames=tuple(f.id for f in frames), loss=made.program.id,
            model_outputs=made.model_outputs, data_inputs=data,
            outputs=outputs, minibatches=most, minibatch_tokens=c.parts.tokens, epochs=cast(int, c.given["epochs"]),
            shuffle=bool(c.given["shuffle"]) and most > 1, call=number,
            invariant=self.flow.models[name].invariant_training,
            nonfinite="skip" if skips else "stop", rate=rate, ids=made.ids, heads=heads,
            first_pass=made.first_pass, whole_prompts=made.whole_prompts,
            router_bias_update_rate=float(cast(float, c.given["router_bias_update_rate"]))))
        return NO_VALUE

    def _outputs(self, node: str, metrics: Iterable[str], span: Span) -> tuple[tuple[str, str], ...] | Bad:
        """(metric, value) of a call, which the flow logs."""
        shown = node.replace(".train", "", 1)
        outputs = tuple((m, self.flow.value(f"{node}/{m}", "batch", "")) for m in metrics)
        if taken := [f"{shown}/{m}" for m, _ in outputs if f"{shown}/{m}" in BUILT_IN]:
            return self.errors.add("RL0111", f"`{taken[0]}` is a built-in field of {METRICS}", span,
                                   help="choose another name for the metric of the loss, or for the model")
        self.flow.metrics += [(f"{shown}/{m}", v) for m, v in outputs]
        return outputs

    def _rate(self, call: ast.Call, scope: Scope) -> str | Bad:
        """The value that `lr=` computes; "" without it."""
        given = [a.value for a in call.args if a.name is not None and a.name.name == "lr"]
        if not given:
            return ""
        if len(given) > 1:
            return self.errors.add("RL0215", "`lr` is passed twice", given[1].span, help="remove one of the two")
        term = self.flow.exprs.term(given[0], scope)
        if isinstance(term, Bad):
            return BAD
        if term.dtype != "f32" or term.level != "batch" or term.unit.word:
            code = "RL0201" if term.level != "batch" else "RL0205"
            return self.errors.add(code, "`lr` must be a single number per step, without a unit", given[0].span,
                                   f"this is {describe(term)}",
                                   help="for example `lr=1e-6 * min(1, step_number() / 100)`")
        if term.constant and not 0 <= float(term.value) < inf:
            return self.errors.add("RL0205", "`lr` must be at least 0", given[0].span, f"this is {term.value:g}")
        return self.flow.materialize(term, "lr", given[0].span, force=True).name

    def _trained_rows(self, call: ast.Call, refs: list[FrameRef]) -> Bad | None:
        """What is wrong with the one or two batches of a `train`; None: nothing."""
        answered = [self.calls.check_responses(r, "train", call.span) for r in refs]  # a list: each reports its mistake
        if not all(answered):
            return BAD
        if refs[0].frame.row_space != refs[-1].frame.row_space:
            return self.errors.add("RL0202",
                                   f"`{source_name(refs[0].frame)}` and `{source_name(refs[1].frame)}` are not the two "
                                   "sides of a pair", call.span, help=_help_for_two(refs))
        if len(refs) == 2 and refs[0].frame.id == refs[1].frame.id:
            second = [a for a in call.args if a.name is None][1]
            return self.errors.add("RL0215", f"`{source_name(refs[1].frame)}` is passed twice", second.span,
                                   "both sides are the same",
                                   help=_help_for_two(refs) if _pair_of(refs[0]) else "pass it once")
        return None


def _pair_of(ref: FrameRef) -> str:
    """The name of the pairs that a batch is one side of; "" for another batch."""
    name, _, side = source_name(ref.frame).rpartition(".")
    return name if (ref.contents == "pairs" or ref.paired) and side in ("chosen", "rejected") else ""


def _help_for_two(refs: list[FrameRef]) -> str:
    """What to train on instead of two batches that are not the two sides of a pair."""
    pair = next(filter(None, map(_pair_of, refs)), "")
    if pair:
        return f"train on `{pair}.chosen` and `{pair}.rejected`"
    a, b = (r.frame for r in refs[:2])
    if a.row_space == b.row_space:
        return f"make pairs: `duel = pair({source_name(a)}, {source_name(b)})`, then `duel.chosen` and `duel.rejected`"
    if a.prompt_space == b.prompt_space and all(r.contents == "generated" for r in refs):
        one, other = (f"pick({source_name(f)}, {x})" for f, x in ((a, "x"), (b, "y")))
        return f"make pairs of one sequence of each prompt: `duel = pair({one}, {other})`, then `duel.chosen` and " \
               "`duel.rejected`"
    return "train on one batch, or on the two sides of pairs from data: `data NAME = jsonl(..., kind=\"pairs\")`, " \
           "`pair = NAME.next()`, then `pair.chosen` and `pair.rejected`"
