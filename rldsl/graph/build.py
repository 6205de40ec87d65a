"""From a syntax tree to the dataflow graph: the front door of the semantic part of the compiler.

In: the program's file, --set values, an optional placement file. Out: a Graph, or a Failure with every error found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

from rldsl.diag import Diagnostic, Failure
from rldsl.graph import carried, declare, lora
from rldsl.graph import model as g
from rldsl.graph.buffers import declared, with_stored
from rldsl.graph.flow import FlowBuilder
from rldsl.graph.lag import check_lag, generates, nodes_ahead, nodes_that_may
from rldsl.graph.params import param, supplied
from rldsl.graph.prune import prune, tables
from rldsl.graph.row_formats import ROWS, row_formats
from rldsl.plan.expr import Scalar
from rldsl.plan.function import Function
from rldsl.semantics import options
from rldsl.semantics.alone import check_alone
from rldsl.semantics.errors import BAD, Bad, Errors
from rldsl.semantics.expressions import ExpressionBuilder
from rldsl.semantics.levels import Spaces
from rldsl.semantics.modules import Modules
from rldsl.semantics.scope import Scope
from rldsl.semantics.terms import Term, input_
from rldsl.semantics.values import BufferRef, DataRef, Meaning, MeshValue, ModelRef, Module, StateRef
from rldsl.source import SourceFile, Span
from rldsl.syntax import ast
from rldsl.syntax.errors import too_deep
from rldsl.syntax.parse import parse
from rldsl.syntax.slips import slips

PLACEMENT = (ast.MeshDecl, ast.PlaceRule, ast.Cluster, ast.Param)


def read_text(path: str) -> str:
    """The text of a file, byte for byte, so that a hash of it is the hash of the file."""
    try:
        data = Path(path).read_bytes()
    except ValueError as error:  # no system has a file whose name has a null byte
        raise OSError(str(error)) from None
    return data.decode("utf-8")


def build(file: ast.File, sets: Mapping[str, Scalar], place: ast.File | None = None,
          read: Callable[[str], str] = read_text) -> g.Graph:
    """The graph of a program. sets: values for `param`s. place: a second file with `mesh`, `place`, `cluster` and
    `param` declarations. Raises Failure with all diagnostics (RL01xx, RL02xx)."""
    graph, found = build_recovering(file, sets, place, read)
    if found or graph is None:
        raise Failure(found)
    return graph


def build_recovering(file: ast.File, sets: Mapping[str, Scalar], place: ast.File | None = None,
                     read: Callable[[str], str] = read_text, parse: Callable[[SourceFile], ast.File] = parse,
                     ) -> tuple[g.Graph | None, tuple[Diagnostic, ...]]:
    """The graph, and every error found. Despite errors, the graph contains what is correct, so that its placement can
    be checked too; it is None where checking it would only report spurious errors. parse: of imported files; an editor
    keeps their trees."""
    try:
        return _build_recovering(file, sets, place, read, parse)
    except RecursionError:  # expressions in functions in functions
        return None, (too_deep(Span(file.source, 0, min(1, len(file.source.text)))),)


def _build_recovering(file: ast.File, sets: Mapping[str, Scalar], place: ast.File | None,
                      read: Callable[[str], str], parse: Callable[[SourceFile], ast.File]
                      ) -> tuple[g.Graph | None, tuple[Diagnostic, ...]]:
    found = slips(file)
    if found:
        return None, found
    errors = Errors()
    modules = Modules(parse, read, errors)
    module = modules.main(file)
    prelude = modules.prelude()
    exprs = ExpressionBuilder(Spaces(), errors, prelude)
    more = _placement_items(place, modules, errors) if place is not None else ()
    items = file.items + more
    top = _Declarations(module, modules, exprs, sets, read, supplied(file.items, more))
    for item in items:
        top.add(item)
    for m, f in modules.files:
        check_alone(m, f, errors, prelude)
    declare.unknown_sets(sets, {p for p, _ in top.params}, errors)
    flow, scope = _only_flow(file, errors), Scope(module)
    if flow is None:
        return None, tuple(errors.found)
    _set_row_formats(flow, top, exprs)
    buffers = _buffers(flow, top, prelude) if top.buffers else {}
    builder = FlowBuilder(exprs, top.models, top.data, top.states, buffers)
    given = options.read(options.FLOW, [(o.name, o.value) for o in flow.options], "a flow", flow.name.span, exprs,
                         scope)
    _note_first_bindings(flow, exprs)
    _set_lags(builder, flow, given, scope)
    known: dict[str, Meaning] = {s.name: input_(s.name, "batch", "", s.span) for s in top.states.values()
                                 if not s.data}
    body = carried.with_strides(builder.block(flow.body, Scope(module, scope, known), "flow"), errors)
    lora.check(top.models.values(), {n.model for n in g.nodes(body) if isinstance(n, g.Sync)}, errors)
    rules = top.placements()
    if isinstance(given, Bad) or any(isinstance(i, ast.Cluster) for i in items) and top.cluster is None:
        return None, tuple(errors.found)
    return _graph(file, flow, given, top, builder, buffers, body, rules), tuple(errors.found)


def _set_lags(builder: FlowBuilder, flow: ast.Flow, given: dict[str, options.Value] | Bad, scope: Scope) -> None:
    """The lag of the flow, and the largest one of its calls. given: the options of the flow."""
    exprs = builder.exprs
    if not isinstance(given, Bad):
        builder.own_lag, builder.steps = cast(int, given["lag"]), cast(int, given["steps"])
        at = next((o.value.span for o in flow.options if o.name.name == "lag"), flow.name.span)
        check_lag(builder.own_lag, builder.steps, at, exprs.errors)
    builder.lag = max(builder.own_lag, *_lags_of_calls(flow, exprs, scope), 0)


def _graph(file: ast.File, flow: ast.Flow, given: dict[str, options.Value], top: _Declarations, builder: FlowBuilder,
           buffers: dict[str, g.Buffer], body: tuple[g.Item, ...], rules: tuple[g.Rule, ...]) -> g.Graph:
    """The graph of a flow whose body is built. given: the options of the flow. Without errors it has only what
    something reads."""
    exprs, errors = builder.exprs, builder.exprs.errors
    functions = _used_functions(top.modules, builder, body)
    values, frames = tuple(builder.values.values()), tuple(exprs.spaces.frames.values())
    lag, ahead = builder.lag, frozenset[str]()
    lasting = frozenset((*(s.name for s in top.states.values()), *buffers))
    if lag:
        ahead = nodes_ahead(body, lasting, flow.name.span, errors)
    _check_lag_has_effect(flow, builder, errors)
    if not errors.found:
        body = prune(body, {v for _, v in builder.metrics} | {builder.stop})
        values, frames = tables(body, values, exprs.spaces.frames)
    return g.Graph(
        program=file.source.name, flow=flow.name.name, steps=cast(int, given["steps"]), seed=cast(int, given["seed"]),
        params=tuple(top.params), sources=tuple(top.modules.sources), cluster=top.cluster,
        models=tuple(top.models.values()), data=tuple(top.data.values()),
        frames=frames, values=values,
        functions=functions, programs=tuple(builder.programs),
        items=body, metrics=tuple(builder.metrics), rules=rules,
        states=tuple(s for s in top.states.values() if any(v.id == s.name for v in values)),
        buffers=tuple(b for b in with_stored(buffers, builder.buffers).values()
                      if any(isinstance(n, g.Store) and n.buffer == b.name for n in g.nodes(body))),
        checkpoint=builder.checkpoint, stop=builder.stop, lag=lag, ahead=ahead,
        may_run_ahead=nodes_that_may(body, lasting, ahead, values) if lag else frozenset())


def _set_row_formats(flow: ast.Flow, top: _Declarations, exprs: ExpressionBuilder) -> None:
    """What the rows of each source are, which the flow decides; and whether its batch counts them."""
    for name, row_format in row_formats(flow, top.data).items():
        top.data[name] = replace(top.data[name], row_format=row_format)
        unit = top.data[name].unit
        if unit is not None:
            options.counts("batch", "prompts" if top.data[name].answers else ROWS[row_format], *unit, exprs)


def _note_first_bindings(flow: ast.Flow, exprs: ExpressionBuilder) -> None:
    """Where each name of the flow is bound first, for messages about a use before it."""
    for node in ast.walk(flow):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            exprs.first_bound.setdefault(target.name, node.span)


def _check_lag_has_effect(flow: ast.Flow, builder: FlowBuilder, errors: Errors) -> None:
    """RL0223 for a lag of the flow that no call takes."""
    if 0 < builder.own_lag < builder.lag and not errors.found:  # RL0205 may have said so
        errors.add("RL0223", "`lag` of the flow has no effect: every call has its own lag", flow.name.span,
                   help=f"remove `lag={builder.own_lag}`, or those of the calls")


def _used_functions(modules: Modules, builder: FlowBuilder, body: tuple[g.Item, ...]) -> tuple[Function, ...]:
    """The Python functions and environments that the flow uses."""
    used = {str(n.attr("function")) for p in builder.programs for n in p.nodes if n.op == "py"}
    used |= {n.function for n in g.nodes(body) if isinstance(n, g.Derive)}
    used |= {e for n in g.nodes(body) if isinstance(n, g.Generate) and n.conversation
             for e in n.conversation.environments}
    return tuple(f for name, f in modules.functions.items() if name in used)


def _lags_of_calls(flow: ast.Flow, exprs: ExpressionBuilder, scope: Scope) -> list[int]:
    """What calls of `generate` say, as far as it is sound; what is not, is reported where the call is built."""
    known, found = list(exprs.errors.found), list[int]()
    for call in (n for n in ast.walk(flow) if isinstance(n, ast.Call) and generates(n)):
        for arg in (a for a in call.args if a.name is not None and a.name.name == "lag"):
            value = exprs.scalar(arg.value, scope)
            found += [value] if type(value) is int else []
    exprs.errors.found[:] = known
    return found


def _only_flow(file: ast.File, errors: Errors) -> ast.Flow | None:
    """The flow of a program. Errors: RL0109 for none, and for several."""
    flows = [i for i in file.items if isinstance(i, ast.Flow)]
    if len(flows) == 1:
        return flows[0]
    where = flows[1].name.span if flows else Span(file.source, 0, 0)
    errors.add("RL0109", "a program can have only one flow" if flows else "the program has no flow", where,
               help="" if flows else "add `flow NAME(steps=...) { ... }`")
    return None


def _placement_items(place: ast.File, modules: Modules, errors: Errors) -> tuple[ast.Declaration, ...]:
    """The declarations of a placement file. Errors: RL0108 for those that only a program may contain."""
    modules.main(ast.File(place.source, ()))  # for the record of sources
    for item in place.items:
        if not isinstance(item, PLACEMENT):
            errors.add("RL0108", "a placement file may contain only `mesh`, `place`, `cluster` and `param`", item.span,
                       help="move this to the main program")
    return tuple(i for i in place.items if isinstance(i, PLACEMENT))


def _buffers(flow: ast.Flow, top: _Declarations, prelude: Module) -> dict[str, g.Buffer]:
    """The buffers, with what their rows have. The flow is walked for it, and what the walk makes is dropped: a `sample`
    may come before the `add` that says it, and what is added may come from a sample of another buffer."""
    buffers = top.buffers
    for _ in range(len(buffers)):
        exprs = ExpressionBuilder(Spaces(), Errors(), prelude)
        builder = FlowBuilder(exprs, top.models, top.data, top.states, buffers)
        known: dict[str, Meaning] = {s.name: input_(s.name, "batch", "", s.span) for s in top.states.values()
                                     if not s.data}
        builder.block(flow.body, Scope(top.module, Scope(top.module), known), "flow")
        found = with_stored(buffers, builder.buffers)
        if found == buffers:
            break
        buffers = found
    return buffers


class _Declarations:
    """Top-level declarations in program order, each bound in the module as it comes."""

    def __init__(self, module: Module, modules: Modules, exprs: ExpressionBuilder, sets: Mapping[str, Scalar],
                 read: Callable[[str], str], placed: Mapping[str, ast.Param]):
        self.placed = placed
        self.module, self.modules, self.exprs, self.sets, self.read = module, modules, exprs, sets, read
        self.scope = Scope(module)
        self.params: list[tuple[str, Scalar]] = []
        self.models: dict[str, g.Model] = {}
        self.data: dict[str, g.Data] = {}
        self.states: dict[str, g.State] = {}
        self.buffers: dict[str, g.Buffer] = {}
        self.cluster: g.Cluster | None = None
        self._rules: list[ast.PlaceRule] = []

    def add(self, item: ast.Declaration) -> None:
        match item:
            case ast.Param():
                if item.name.name in self.placed and item is self.placed[item.name.name]:
                    return  # it gave a parameter of the program its value
                value = param(item, self.sets, self.placed, self.exprs, self.scope, self.module.name)
                self.params.append((item.name.name, value.value if isinstance(value, Term) else ""))
                self.modules.bind(self.module, item.name, value)
            case ast.State(data=ast.Ident()):
                state = declare.row_state(item, self.data, self.states, self.exprs, self.scope)
                if not isinstance(state, Bad):
                    self.states[state.name] = state
            case ast.State(name=name):
                initial = declare.state(item, self.exprs, self.scope)
                self.states[name.name] = g.State(name.name, initial, item.span)
                self.modules.bind(self.module, name, StateRef(name.name))
            case ast.Buffer(name=name):
                buffer = declared(item, self.exprs, self.scope)
                if not isinstance(buffer, Bad):
                    self.buffers[name.name] = buffer
                self.modules.bind(self.module, name, BAD if isinstance(buffer, Bad) else BufferRef(name.name))
            case ast.Cluster():
                made = declare.cluster(item, self.exprs, self.scope, self.read)
                if not isinstance(made, Bad):
                    self.cluster = made  # a placement file comes later and wins
            case ast.MeshDecl():
                mesh = self.exprs.build(item.value, self.scope)
                if not isinstance(mesh, (MeshValue, Bad)):
                    mesh = self.exprs.errors.add("RL0203", "a mesh is written `mesh(0:8)`", item.value.span)
                self.modules.bind(self.module, item.name, mesh)
            case ast.ModelDecl():
                model = declare.model(item, self.exprs, self.scope)
                meaning: Meaning = BAD
                if not isinstance(model, Bad):
                    self.models[item.name.name] = model
                    meaning = ModelRef(model.name, model.head_name, model.optimizer is not None)
                self.modules.bind(self.module, item.name, meaning)
            case ast.DataDecl():
                data = declare.data(item, self.exprs, self.scope)
                if not isinstance(data, Bad):
                    self.data[item.name.name] = data
                self.modules.bind(self.module, item.name, BAD if isinstance(data, Bad) else DataRef(data.name))
            case ast.PlaceRule():
                self._rules.append(item)

    def placements(self) -> tuple[g.Rule, ...]:
        made = [(r, declare.clause(r.clause, self.exprs, self.scope)) for r in self._rules]
        return tuple(g.Rule(r.selector, c, r.span) for r, c in made if not isinstance(c, Bad))
