"""Calls of models and data in the flow: signatures, heads, frames, and the nodes they become."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from rldsl.diag import Label, counted
from rldsl.graph import carried
from rldsl.graph import model as g
from rldsl.graph.computations import label
from rldsl.graph.conversations import ONLY_WITH_ENV, conversation, env_of
from rldsl.graph.distributions import distribution, logprobs_at, same_tokens, top, without_ids
from rldsl.graph.lag import check_lag
from rldsl.graph.other_prompts import PROMPT, behind_prompt
from rldsl.graph.row_states import ROW_NUMBERS
from rldsl.graph.train_calls import TrainCalls
from rldsl.plan.events import Sampling
from rldsl.plan.expr import Level
from rldsl.plan.heads import CALLS, DISTRIBUTION, GENERATE, LOGPROBS_AT, TOP, TRAIN, heads_with
from rldsl.plan.model import CONVERSATION_VALUES, INDEX, PROMPTS, Frame, Space
from rldsl.semantics import options
from rldsl.semantics.errors import BAD, Bad, suggest
from rldsl.semantics.levels import source_name
from rldsl.semantics.scope import Scope
from rldsl.semantics.terms import Term, const, input_
from rldsl.semantics.values import BufferRef, DataRef, FrameRef, Meaning, ModelRef, Pairs, describe
from rldsl.source import Span
from rldsl.syntax import ast
from rldsl.syntax.errors import PLACEMENT

if TYPE_CHECKING:
    from rldsl.graph.flow import FlowBuilder


# options of a placement -> what to say where a call has one
OF_PLACEMENT = {name: f"it is an option of the placement: write it after the call, `... {name}=...`, or in `place`"
                for name in PLACEMENT}
# calls without `prompt=`: option -> what to do instead
INSTEAD_OF: Mapping[str, Mapping[str, str]] = {
    GENERATE: {PROMPT: "the model answers the prompts that the call is given: `m.generate(ask(x))`, with `ask` "
                       "declared `-> prompts(max_tokens=...)`"},
    TRAIN: {PROMPT: "a model trains on responses with their own prompts. Their log-probs under other prompts can be "
                    "an argument of the loss: `teacher.logprobs(gen, prompt=ask(gen))`"},
}


class CallsOfFlow:
    """The calls of models and data sources in `flow`."""

    def __init__(self, flow: FlowBuilder):
        self.flow, self.errors = flow, flow.errors
        self.prompts_of: dict[str, str] = {}  # generated frame -> the frame that it was generated from
        self.trains = TrainCalls(self)

    def nested(self, owner: ModelRef | DataRef | BufferRef, call: ast.Call, scope: Scope) -> Meaning:
        """A call inside an expression: an inference is anonymous, anything else needs a separate statement."""
        call_name = cast(ast.Attribute, call.func).name.name
        if isinstance(owner, DataRef | BufferRef) or call_name in (GENERATE, TRAIN):
            return self.errors.add("RL0212", f"`{call_name}` inside an expression", call.func.span,
                                   help=f"write it as a separate statement: `name = {call.func.span.text}(...)`"
                                   if call_name != TRAIN else "write it as a separate statement")
        return self.make(owner, call, scope, None, None, call.span)

    def make(self, owner: ModelRef | DataRef | BufferRef, call: ast.Call, scope: Scope, target: str | None,
             clause: g.Clause | None, span: Span) -> Meaning:
        """Append the nodes of a call and return what it stands for: `NO_VALUE` for a train call. target: the name that
        the result is bound to; None: it has none."""
        func = cast(ast.Attribute, call.func)
        ident = func.name
        if isinstance(owner, BufferRef):
            return self.flow.buffers.make(owner, call, scope, target, clause, span, self.flow.inside)
        if isinstance(owner, DataRef):
            return self._next(owner, ident, call, scope, target, span)
        call_name, legal = ident.name, owner.head.calls
        if call_name not in legal:
            code = "RL0206" if call_name in CALLS else "RL0112"
            other = heads_with(call_name)
            return self.errors.add(code, f"a {owner.head_name} has no call `{call_name}`", ident.span,
                                   f"`{owner.name}` is a {owner.head_name}", labels=self.declared(owner),
                                   help=f"`{call_name}` needs a {other[0]}" if other else suggest(call_name, legal))
        ids: Term | None = None
        if call_name == LOGPROBS_AT:
            both = without_ids(self.flow, call, scope)
            if isinstance(both, Bad):
                return BAD
            call, ids = both
        refs = self._refs(call, call_name, scope)
        if isinstance(refs, Bad):
            return BAD
        if call_name == TRAIN:
            return self.trains.train(owner, call, refs, scope, target, clause, span)
        if len(refs) != 1:
            return self.errors.add("RL0204", f"`{call_name}` takes one batch, not {len(refs)}", call.span)
        if call_name == GENERATE:
            return self._generate(owner, call, refs[0], scope, target, clause, span)
        if ids is not None and not same_tokens(self.flow, refs[0].frame, ids):
            return BAD
        return self._infer(owner, call_name, call, refs[0], scope, target, clause, span, ids)

    def declared(self, owner: ModelRef) -> tuple[Label, ...]:
        return (Label(self.flow.models[owner.name].span, "declared here"),) if owner.name in self.flow.models else ()

    def _refs(self, call: ast.Call, call_name: str, scope: Scope) -> list[FrameRef] | Bad:
        """The batches given by position."""
        refs: list[FrameRef] = []
        bad = False
        for arg in call.args:
            if arg.name is not None:
                continue
            value = self.flow.exprs.build(arg.value, scope)
            if isinstance(value, FrameRef):
                refs.append(value)
                continue
            bad = True
            if not isinstance(value, Bad):
                takes, side = ("prompts", "load the data with `kind=\"prompts\"`") if call_name == GENERATE else \
                    ("sequences", "give both sides, `train(pair.chosen, pair.rejected, ...)`, or one" if
                     call_name == TRAIN else "use one side: `.chosen` or `.rejected`")
                self.errors.add("RL0203", f"`{call_name}` takes {takes}, not {describe(value)}", arg.span,
                                help=side if isinstance(value, Pairs) else "")
        return BAD if bad else refs

    def _next(self, owner: DataRef, ident: ast.Ident, call: ast.Call, scope: Scope, target: str | None,
              span: Span) -> Meaning:
        if ident.name != "next":
            return self.errors.add("RL0112", f"the data `{owner.name}` has no call `{ident.name}`", ident.span,
                                   help=f"write `{owner.name}.next()`")
        if wrong := [a for a in call.args if a.name is None or a.name.name != "weight"] or call.args[1:]:
            return self.errors.add("RL0204", "`next` takes only `weight=`", wrong[0].span,
                                   help=f"the number of rows is the option `batch` of `{owner.name}`")
        if not self.flow.evaluations.may_fetch(owner.name, span) or target is None:
            return BAD
        if call.args and self.flow.evaluations.inside:
            return self.errors.add("RL0212", "a weight inside `eval`", call.args[0].span,
                                   help="an evaluation reads every row once: remove the weight")
        weight = self.flow.row_states.weight(owner, call.args[0].value, target, scope) if call.args else None
        if isinstance(weight, Bad):
            return BAD
        data = self.flow.data[owner.name]
        given = dict(data.options)
        sides = [f"{target}.chosen", f"{target}.rejected"] if data.row_format == "pairs" else [target]
        rows = [Space(target, int(given["batch"]))]
        if data.answers:
            sides = [f"{target}.{PROMPTS}", target]
            rows = [Space(sides[0], int(given["batch"])), Space(target, int(given["batch"]) * data.answers, sides[0],
                                                                data.answers)]
        frames = []
        for i, side in enumerate(sides):
            space = rows[min(i, len(rows) - 1)]
            answer = 0 if data.row_format == "prompts" or data.answers and not i else int(given["max_answer_tokens"])
            frames.append(self.flow.spaces.add(Frame(
                side, space.id, owner.name, int(given["max_prompt_tokens"]), answer,
                present_in=side if self.flow.evaluations.inside else "",
                label=f"prompts of {target}" if data.answers and not i else ""), *rows[: i + 1]))
        writes = [w for s in sides for w in (self.flow.value(f"{s}.tokens", "token", s, "i64", "tokens"),
                                             self.flow.value(f"{s}.lengths", "seq", s, "i64", "lengths"))]
        writes.append(self.flow.value(f"{sides[0]}.columns", "seq", sides[0], "text", "columns"))
        self.flow.columns[rows[0].id] = writes[-1]
        level: Level = "prompt" if data.row_format == "prompts" else "seq"
        of = sides[-1] if data.answers else sides[0]  # whose rows the number columns have one number of each
        writes += [self.flow.value(f"{of}.{n}", level, of) for n in (*data.numbers, *([INDEX] if data.answers else ()))]
        states = self.flow.row_states.of(owner.name)
        reads: tuple[str, ...] = ()
        if states or weight is not None:
            numbers = self.flow.value(f"{sides[0]}.{ROW_NUMBERS}", "seq", sides[0], "i64", ROW_NUMBERS)
            if weight is None:
                writes.append(numbers)
            else:
                reads = (numbers,)
                drawn = self.flow.unique(f"{target} rows")
                self.flow.items.append(g.Draw(
                    id=drawn, reads=tuple(v for _, v in weight.inputs), writes=reads, span=span, data=owner.name,
                    frame=sides[0], program=weight.program, inputs=weight.inputs, columns=weight.columns))
        self.flow.items.append(g.Fetch(id=self.flow.unique(target), reads=reads, writes=tuple(writes), span=span,
                                       data=owner.name, frames=tuple(sides)))
        if data.answers:  # named values, since a number of an answer belongs to it wherever it is picked
            fields = tuple((n, input_(f"{target}.{n}", "seq", frames[1].row_space, span))
                           for n in (*data.numbers, INDEX))
            return FrameRef(frames[1], data.row_format, (), states, target, fields)
        refs = [FrameRef(f, data.row_format, data.numbers, states, sides[0]) for f in frames]
        return Pairs(refs[0], refs[1]) if len(refs) == 2 else refs[0]

    def options_of(self, table: dict[str, options.Opt], call: ast.Call, call_name: str, scope: Scope,
                 skip: tuple[str, ...] = ()) -> dict[str, options.Value] | Bad:
        """skip: options that are read elsewhere, and suggested here."""
        given = [(a.name, a.value) for a in call.args if a.name is not None and a.name.name not in skip]
        return options.read(table, given, f"`{call_name}`", call.span, self.flow.exprs, scope, skip,
                            {**OF_PLACEMENT, **INSTEAD_OF.get(call_name, {})})

    def _generate(self, owner: ModelRef, call: ast.Call, prompts: FrameRef, scope: Scope, target: str | None,
                  clause: g.Clause | None, span: Span) -> Meaning:
        skip = ("env", *options.ENVIRONMENT) if env_of(call) else ("env", *ONLY_WITH_ENV)
        given = self.options_of(options.GENERATE, call, "generate", scope, skip=skip)
        talk = conversation(self.flow, call, prompts, scope)
        if prompts.contents not in ("prompts", "generated"):
            return self._answered(prompts, call.args[0].span)
        if isinstance(given, Bad) or isinstance(talk, Bad):
            return BAD
        if cast(int, given["min_new_tokens"]) > cast(int, given["max_new_tokens"]):
            return self.errors.add("RL0205", "`min_new_tokens` is larger than `max_new_tokens`", call.func.span,
                                   f"{given['min_new_tokens']} > {given['max_new_tokens']}",
                                   help="raise `max_new_tokens` or lower `min_new_tokens`")
        if "" in cast(tuple[str, ...], given["stop"]):
            return self.errors.add("RL0205", "`stop` has an empty string", call.func.span,
                                   "every response would end after its first token",
                                   help="remove the empty string, or write `max_new_tokens=1`")
        if target is None:
            return self.errors.add("RL0212", "the result of `generate` is not used", span,
                                   help="assign it to a name: `gen = ...`")
        per_step = cast(int | None, given.pop("per_step"))
        in_step = self._in_step(cast(int | None, given.pop("lag")), call)
        if in_step is None:
            return BAD
        sampling = Sampling(**cast(dict[str, Any], given))
        if per_step is not None and per_step < sampling.max_new_tokens:
            return carried.generate(self.flow, owner, call, prompts, sampling, per_step, in_step, target, clause,
                                    span)
        source = prompts.frame
        longest = source.max_prompt_tokens + source.max_response_tokens  # the whole text so far
        each = sampling.n * (talk.branches if talk else 1)
        frame = self.flow.spaces.add(replace(
            source, id=target, row_space=target, selected_from="", picked_from="", max_prompt_tokens=longest,
            max_response_tokens=talk.max_tokens - longest if talk else sampling.max_new_tokens,
            temperature=sampling.logprob_temperature, label="", max_turns=talk.max_turns if talk else 0,
            present_in=target if talk and talk.branches > 1 else source.present_in),
            Space(target, source.count * each, source.row_space, each))
        value = self.flow.value
        writes: tuple[str, ...] = (
            value(f"{target}.tokens", "token", target, "i64", "tokens"), value(f"{target}.logprobs", "token", target),
            value(f"{target}.finished", "seq", target, "bool"))
        value(f"{target}.lengths", "seq", target, "i64", "lengths")
        reads: tuple[str, ...] = (f"{source.id}.tokens",)
        fields: tuple[tuple[str, Term], ...] = ()
        if talk is not None:
            reads += (self.flow.columns[source.chain[-1].id],)
            writes += (value(f"{target}.turn_sizes", "turn", target, "i64"), *(
                value(f"{target}.{name}", level, target) for name, level in CONVERSATION_VALUES))
            fields = tuple((name, input_(f"{target}.{name}", level, self.flow.spaces.of(frame, level), span))
                           for name, level in CONVERSATION_VALUES)
        old = const(0.0 if in_step else float(self.flow.lag), span)
        fields += ((carried.VERSION, self.flow.exprs.ops.broadcast(old, "token", frame)),)
        self.flow.items.append(g.Generate(
            id=self.flow.unique(target), reads=reads, writes=writes, span=span, clause=clause, model=owner.name,
            prompts=source.id, frame=target, sampling=sampling, conversation=talk, in_step=in_step))
        self.prompts_of[target] = source.id
        return FrameRef(frame, "generated", fields=fields)

    def _in_step(self, lag: int | None, call: ast.Call) -> bool | None:
        """Whether a generate runs in its own step although others run ahead. lag: its option. None after an error."""
        own, most = self.flow.own_lag if lag is None else lag, self.flow.lag
        at = next((a.span for a in call.args if a.name is not None and a.name.name == "lag"), call.span)
        if lag and self.flow.inside in ("repeat", "eval"):
            self.errors.add("RL0205", f"`lag` of a call inside `{self.flow.inside}`", at,
                            "what is in this block does not run ahead", help="remove it, or move the call to the flow")
            return None
        if lag and not check_lag(lag, self.flow.steps, at, self.errors):
            return None
        if own not in (0, most):
            other = "the flow" if self.flow.own_lag == most else "another one"
            self.errors.add("RL0205", f"a call runs ahead by {counted(own, 'step')}, {other} by {most}", at,
                            help=f"use the same lag, or 0: write `lag={most}`")
            return None
        return own < most

    def _answered(self, ref: FrameRef, span: Span) -> Bad:
        """`generate` on sequences whose responses are data."""
        alone = self.flow.spaces.data_prompts(ref.frame.id)
        return self.errors.add("RL0213", "`generate` needs prompts, or sequences that a model generated", span,
                               f"`{span.text}` contains prompts with answers",
                               help=f"generate from the prompts alone: `{span.text}.{PROMPTS}`" if alone else
                               "load the data with `kind=\"prompts\"`")

    def check_responses(self, ref: FrameRef, call_name: str, span: Span) -> bool:
        """Whether the sequences have responses; RL0213 where not."""
        if ref.contents == "prompts":
            self.errors.add("RL0213", f"`{call_name}` needs sequences with a response", span,
                            f"`{source_name(ref.frame)}` contains only prompts",
                            help="generate responses first, or load answers")
        return ref.contents != "prompts"

    def _infer(self, owner: ModelRef, call_name: str, call: ast.Call, ref: FrameRef, scope: Scope, target: str | None,
               clause: g.Clause | None, span: Span, ids: Term | None = None) -> Meaning:
        given = self.options_of(options.TOP if call_name == TOP else {}, call, call_name, scope, skip=(PROMPT,))
        if not self.check_responses(ref, call_name, call.args[0].span) or isinstance(given, Bad):
            return BAD
        read = behind_prompt(self.flow, call, ref, scope)
        if isinstance(read, Bad):
            return BAD
        output = owner.head.output_of(call_name)
        frame = ref.frame
        known = ""
        if target is None:
            target, known = self.flow.anonymous("expr"), label(call.span)
        if call_name == TOP:
            return top(self.flow, owner, frame, read, cast(int, given["k"]), target, clause, span, known)
        if call_name == DISTRIBUTION:
            return distribution(self.flow, owner, frame, read, target, clause, span, known)
        if ids is not None:
            return logprobs_at(self.flow, owner, frame, read, ids, target, clause, span, known)
        self.flow.value(target, output.level, frame.id, label=known)
        self.flow.items.append(g.Infer(
            id=self.flow.unique(target), reads=(f"{read.id}.tokens",), writes=(target,), span=span, clause=clause,
            model=owner.name, frame=read.id, output_name=output.name, value=target, temperature=frame.temperature))
        return input_(target, output.level, self.flow.spaces.of(frame, output.level), span)
