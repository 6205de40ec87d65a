"""The placement step: a graph goes in, a `PlacedGraph` comes out.

In: a graph with clauses and rules. Out: a placement for every call and computation, the plan's model records with their
training layouts, and the size of the world. Invariants: every layout fills its mesh and its model supports it; every
model is trained under one layout; a computation's layout is dp=|mesh|.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import cast

from rldsl.diag import Diagnostic, Failure, Label, fail
from rldsl.graph import model as g
from rldsl.models import hub, hub_adapters, hub_data
from rldsl.models.families import Family, describe, sizes_of
from rldsl.placement import (
    backends,
    budget,
    distributions,
    engines,
    free,
    images,
    invariant,
    positions,
    resident,
    reuse,
    router_bias,
    sync,
    tokenizers,
)
from rldsl.placement.degrees import DEGREES, Cluster, mesh_ranks, placement_of
from rldsl.placement.lora import split_adapter_parameters
from rldsl.placement.model import Call, Computation, PlacedGraph, Placement, label, layout_of, mesh_of_range
from rldsl.placement.patterns import check_patterns
from rldsl.placement.rules import Choice, collect_choices, option_span, resolve_choices
from rldsl.plan.model import Layout, Lora, Mesh, Model
from rldsl.progress import stage

Describe = Callable[..., Family]


def with_commits_of_the_hub(graph: g.Graph) -> g.Graph:
    """The program with the commits of the models and data that the Hub has. RL0095."""
    return replace(graph, models=tuple(replace(m, path=hub.resolve(m.path, m.path_span or m.span), lora=_adapter(m))
                                       for m in graph.models),
                   data=tuple(_with_commit(d) if d.format == "hf" else d for d in graph.data))


def _adapter(model: g.Model) -> Lora | None:
    if model.lora is None or not model.lora.path:
        return model.lora
    return replace(model.lora, path=hub_adapters.resolve(model.lora.path, model.lora_span or model.span))


def _with_commit(data: g.Data) -> g.Data:
    given = dict(data.options)
    return replace(data, path=hub_data.resolve(data.path, str(given["subset"]), str(given["split"]),
                                               data.path_span or data.span))


def place_graph(graph: g.Graph, place_file: str = "", describe: Describe = describe) -> PlacedGraph:
    """Place all of `graph`. place_file: name of the placement file. describe: reads model directories.
    Raises Failure with every mistake found (RL03xx)."""
    choices = resolve_choices(graph, place_file)
    cluster = cluster_of(graph, choices)
    families = _families(graph, describe)
    sync.check_sync_parameters(graph, families)
    images.check_images(graph, families)
    router_bias.check_router_biases(graph, families)
    tokenizers.check_tokenizers(graph, families)
    graph = distributions.with_hidden_sizes(distributions.with_known_tokens(graph, families), families)
    placements, train_layouts = _placements(graph, choices, families, cluster)
    graph, placements = engines.with_differences(graph, placements)
    memory = int((graph.cluster.memory_gb if graph.cluster else 0) * 1e9)
    ema_layouts = sync.ema_layouts(graph, placements, train_layouts)
    models = tuple(replace(_model(m, families[m.name], train_layouts.get(m.name, ""), sync.sync_sources(graph, m.name),
                                  graph.seed),
                           ema_layout=ema_layouts.get(m.name, "")) for m in graph.models)
    sync.check_adapters(graph, models)
    return PlacedGraph(tokenizers.with_tokenizers(graph), models, tuple(families.items()), tuple(placements.items()),
                       tokenizers.tokenizers(graph), cluster.world, cluster.gpus, memory)


def problems_of(graph: g.Graph, place_file: str = "") -> tuple[Diagnostic, ...]:
    """What all checks find that need no model directory: of rules, meshes, degrees."""
    choices, found = collect_choices(graph, place_file)
    try:
        _placements(graph, choices, {}, cluster_of(graph, choices))
    except Failure as failure:
        return tuple(dict.fromkeys((*found, *failure.diagnostics)))
    return found


def placements_of(graph: g.Graph, place_file: str = "") -> dict[str, Placement]:
    """The placements of all calls and computations, as far as they are known without model directories."""
    choices = resolve_choices(graph, place_file)
    return _placements(graph, choices, {}, cluster_of(graph, choices))[0]


def _placements(graph: g.Graph, choices: Mapping[str, Choice], families: Mapping[str, Family],
                cluster: Cluster) -> tuple[dict[str, Placement], dict[str, str]]:
    """(placements of all calls and computations, training layouts of the trained models)"""
    every = tuple(g.nodes(graph.items))
    calls = [n for n in every if isinstance(n, Call)]
    placements = _call_placements(calls, choices, families, cluster)
    train_layouts = _train_layouts(calls, placements)
    if families and any(p.given for p in placements.values()):
        models = {m.name: _model(m, families[m.name], train_layouts[m.name], (), graph.seed) for m in graph.models
                  if m.name in train_layouts}
        placements = free.choose_free_meshes(calls, placements, models, cluster)
    placements |= _compute_placements(graph, choices, placements, cluster)
    resident.check_residency(graph, calls, placements, train_layouts)
    reuse.check_reuse(graph, placements, families)
    distributions.check_heads(graph, placements)
    budget.check_token_budgets(graph, calls, placements)
    backends.check_backends(graph, calls, placements, families)
    invariant.check_invariance(graph, calls, placements, families)
    positions.check_positions(graph, calls, placements, families)
    sync.sync_placements(graph, placements, train_layouts)
    return placements, train_layouts


def cluster_of(graph: g.Graph, choices: Mapping[str, Choice]) -> Cluster:
    """The declared cluster, or one node as large as the largest rank named."""
    if graph.cluster is not None:
        return Cluster(graph.cluster.nodes, graph.cluster.gpus, True)
    named = [c.mesh.devices[1] for c in choices.values() if c.mesh is not None]
    return Cluster(1, max(named, default=1), False)


def _families(graph: g.Graph, describe: Describe) -> dict[str, Family]:
    found: dict[str, Family] = {}
    problems: list[Diagnostic] = []
    same: dict[tuple[str, str, bool], Family] = {}
    for i, m in enumerate(graph.models):
        key = (m.path, m.head_name, m.optimizer is not None)
        stage(f"reading the config of {m.path}", i, len(graph.models))
        try:
            if key not in same:
                same[key] = describe(m.path, m.head_name, m.path_span or m.span, m.optimizer is not None)
            found[m.name] = same[key]
        except Failure as failure:
            problems += failure.diagnostics
    if problems:
        seen: dict[tuple[str, str], Diagnostic] = {}
        for d in problems:  # three models of one missing directory are one mistake
            seen.setdefault((d.code, d.title), d)
        raise Failure(seen.values())
    return found


def _once(problems: Iterable[Diagnostic]) -> list[Diagnostic]:
    """The first of those that say the same of the same text, as of several calls that one rule places."""
    seen: dict[tuple[object, ...], Diagnostic] = {}
    for d in problems:
        seen.setdefault((d.code, d.title, d.span), d)
    return list(seen.values())


def _model(m: g.Model, family: Family, train_layout: str, sources: tuple[str, ...], seed: int) -> Model:
    dtype = m.dtype or ("bfloat16" if family.itemsize == 2 else "float32")
    own = split_adapter_parameters(m, family, seed)
    check_patterns(m, own.params, family.layers)
    return Model(m.name, m.head_name, m.path, dtype, own.params, family.layers, family.config_digest,
                 train_layout, m.optimizer if train_layout else None, updated_from=sources, base=own.base,
                 lora=own.lora, sizes=sizes_of(family), invariant=m.invariant,
                 invariant_training=m.invariant_training)


# ------------------------------------------------------------------------------------------------ calls


def _call_placements(calls: list[Call], choices: Mapping[str, Choice], families: Mapping[str, Family],
                     cluster: Cluster) -> dict[str, Placement]:
    """Places of the calls with their own mesh first, then those that follow another call of their model."""
    placements: dict[str, Placement] = {}
    problems: list[Diagnostic] = []
    late: list[Call] = []
    for node in calls:
        choice = choices.get(node.id)
        if choice is None or choice.mesh is None:
            late.append(node)
            continue
        try:
            mesh = mesh_ranks(choice.mesh, cluster)
            made = _call_placement(node, choice, mesh, families, cluster)
            placements[node.id] = replace(made, given=mesh if choice.mesh.free else None)
        except Failure as failure:
            problems += failure.diagnostics
    if problems:
        raise Failure(_once(problems))
    for node in late:
        choice = choices.get(node.id)
        model = _followed_call(node, calls, placements)
        if model is not None:
            base, why = placements[model.id], f"default: same as {label(model)}"
            if isinstance(node, g.Generate) and base.layout.cp > 1:  # the same boxes, so nothing moves
                x = base.layout
                base = replace(base, layout=layout_of(base.mesh, x.dp * x.cp, x.tp, x.pp, backend=x.backend, ep=x.ep))
                why += ", with dp instead of cp"
            if not isinstance(node, g.Train) and (base.layout.zero or base.layout.vpp > 1):
                why += f", without {' and '.join(k for k in ('zero', 'vpp') if getattr(base.layout, k) > (k == 'vpp'))}"
                base = replace(base, layout=_without_training_options(base.layout, base.mesh))
        else:
            mesh = mesh_of_range(cluster.world)
            base, why = Placement(mesh, layout_of(mesh, dp=cluster.world)), "default: all ranks, data parallel"
        if choice is None:
            placements[node.id] = replace(base, mbs=0, mbt=0, offload=False, span=node.span, why=why, recompute="none",
                                          keep=True, reuse=False, waiting="keep")
            continue
        try:
            given_options = {name for name, _, _ in choice.options}
            more = {"ep", *(("zero", "vpp") if isinstance(node, g.Train) else ())} - given_options
            inherit = () if given_options & {*DEGREES} else tuple(
                (k, getattr(base.layout, k), choice.span) for k in (*DEGREES, *sorted(more)))
            if "backend" not in given_options:
                inherit += (("backend", base.layout.backend, choice.span),)
            inherited = replace(choice, options=choice.options + inherit)
            made = _call_placement(node, inherited, base.mesh, families, cluster)
            placements[node.id] = replace(made, given=base.given)
        except Failure as failure:
            problems += failure.diagnostics
    if problems:
        raise Failure(_once(problems))
    return placements


def _call_placement(node: Call, choice: Choice, mesh: Mesh, families: Mapping[str, Family],
                    cluster: Cluster) -> Placement:
    """The placement of a call on `mesh`. Raises as `placement_of`, and RL0318 and RL0320 for options of
    other calls."""
    made = placement_of(choice, mesh, families.get(node.model), cluster, label(node))
    if isinstance(node, g.Generate) and made.layout.cp > 1:
        raise fail("RL0318", f"`{label(node)}` does not support context parallelism", option_span(choice.span, "cp"),
                   "cp applies only to inference and training",
                   help=f"use dp or tp for generate; with dp={made.layout.dp * made.layout.cp} no parameters have to "
                        "move")
    if made.layout.zero and not isinstance(node, g.Train):
        raise fail("RL0320", f"`{label(node)}` cannot use `zero`", option_span(choice.span, "zero"),
                   "zero applies only to training",
                   help="every forward pass would gather all parameters from the dp ranks: set `zero` only on the "
                        f"train call (`place {node.model}.train ...`), and this call gets an unsharded copy")
    if made.layout.vpp > 1 and not isinstance(node, g.Train):
        raise fail("RL0320", f"`{label(node)}` cannot use `vpp`", option_span(choice.span, "vpp"),
                   "vpp applies only to training",
                   help="only training has backward passes to interleave: set `vpp` only on the train call (`place "
                        f"{node.model}.train ...`), and this call gets a copy")
    if made.waiting != "keep" and not (isinstance(node, g.Generate) and node.conversation is not None):
        raise fail("RL0320", f"`{label(node)}` cannot use `waiting`", option_span(choice.span, "waiting"),
                   "nothing here waits for an environment",
                   help="`waiting` applies only to `generate(..., env=...)`: set it only on that call")
    return made


def _without_training_options(x: Layout, mesh: Mesh) -> Layout:
    """`x` without `zero` and `vpp`, which apply only to training."""
    return layout_of(mesh, x.dp, x.tp, x.pp, x.cp, x.backend, ep=x.ep)


def _followed_call(node: Call, calls: list[Call], placements: Mapping[str, Placement]) -> Call | None:
    """The call of the same model whose mesh a call without one takes: a train call, else the first that is placed."""
    same = [c for c in calls if c.model == node.model and c.id in placements]
    return next((c for c in same if isinstance(c, g.Train)), same[0] if same else None)


def _train_layouts(calls: list[Call], placements: Mapping[str, Placement]) -> dict[str, str]:
    """Model -> the layout of its train calls."""
    first: dict[str, g.Train] = {}
    for node in calls:
        if isinstance(node, g.Train):
            other = first.setdefault(node.model, node)
            if placements[other.id].layout != placements[node.id].layout:
                span = placements[node.id].span or node.span
                raise Failure([Diagnostic(
                    "RL0315", f"`{node.model}` is trained under two layouts", span, f"{placements[node.id].layout.id}",
                    (Label(placements[other.id].span or other.span, f"{placements[other.id].layout.id}"),),
                    help="the optimizer state has a single layout: give both train calls the same placement")])
    return {name: placements[node.id].layout.id for name, node in first.items()}


# ------------------------------------------------------------------------------------------------ computations


class ValueUses:
    """Who writes each value, and which train call needs it: with which node a computation runs by default."""

    def __init__(self, graph: g.Graph):
        nodes = tuple(g.nodes(graph.items))
        in_python = {p.id for p in graph.programs if any(n.op == "py" for n in p.nodes)}
        # what no call should wait for that could train instead: Python takes time, and generation waits for the others
        self._early = {n.id for n in nodes if isinstance(n, Computation) and n.id in graph.ahead} | {
            n.id for n in nodes if n.id in graph.may_run_ahead and isinstance(n, g.Compute) and n.program in in_python}
        self._order = {n.id: i for i, n in enumerate(nodes)}
        self._writer = {v: n for n in nodes for v in n.writes}
        self._train: dict[str, int] = {}  # value -> the first train call that depends on it, by its place in `nodes`
        for i, node in reversed(tuple(enumerate(nodes))):
            needed = [i] if isinstance(node, g.Train) else [self._train[v] for v in node.writes if v in self._train]
            for v in node.reads if needed else ():
                self._train[v] = min(*needed, self._train.get(v, len(nodes)))
        self._nodes = nodes

    def near(self, node: Computation) -> Call | Computation | None:
        """The node with which `node` runs by default: the first train call, in program order, that depends on it; else
        what made its inputs, the last written first. So what is only logged moves nothing. What generation is made
        from, and a Python function that may run ahead of its step, run where their inputs were made."""
        found = [self._train[v] for v in node.writes if v in self._train and node.id not in self._early]
        if found:
            return cast(g.Train, self._nodes[min(found)])
        frames = node.frames if isinstance(node, g.Compute) else ()
        for values in (node.reads, [f"{f}.tokens" for f in frames]):
            made = [w for v in values if isinstance(w := self._writer.get(v), Call | Computation) and w.id != node.id]
            if made:
                return max(made, key=lambda w: self._order[w.id])
        return None

    def anchor(self, node: Computation) -> Call | None:
        """The call with which `node` runs by default; None if it depends on none."""
        seen: set[str] = set()
        found: Call | Computation | None = node
        while isinstance(found, Computation) and found.id not in seen:
            seen.add(found.id)
            found = self.near(found)
        return found if isinstance(found, Call) else None


def _compute_placements(graph: g.Graph, choices: Mapping[str, Choice], calls: Mapping[str, Placement],
                        cluster: Cluster) -> dict[str, Placement]:
    """A computation runs where it says, else where the first train call that needs it runs, else where its inputs are
    made, else on the mesh of the first call."""
    uses, every = ValueUses(graph), tuple(g.nodes(graph.items))
    first = next((calls[n.id].mesh for n in every if n.id in calls), mesh_of_range(cluster.world))
    placements: dict[str, Placement] = {}
    for node in every:
        if not isinstance(node, Computation):
            continue
        choice = choices.get(node.id)
        if choice is not None and choice.mesh is not None:
            mesh = mesh_ranks(choice.mesh, cluster)
            placements[node.id] = placement_of(choice, mesh, None, cluster, label(node), compute=True)
            continue
        near = uses.near(node)
        same = placements.get(near.id) if isinstance(near, Computation) else None
        if near is not None and same is not None:
            why = same.why if same.why.startswith("default: ") else f"default: same as {label(near)}"
            placements[node.id] = Placement(same.mesh, layout_of(same.mesh, dp=same.mesh.size), 0, False, node.span,
                                            why)
            continue
        call = uses.anchor(node)
        mesh = calls[call.id].mesh if call is not None else first
        like = label(call) if call else "the first call"
        placements[node.id] = Placement(mesh, layout_of(mesh, dp=mesh.size), 0, False, node.span,
                                        f"default: same as {like}")
    return placements
