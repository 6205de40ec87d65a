"""A warning for a training on responses of another policy than the one that is trained, whose loss does not know it.

In: a graph with a lag, or with responses that continue in later steps, or with calls of another engine. Out: RL0909, or
RL0912 for the engine, for each `train` of the model that generated its rows, whose loss weighs them by values, and
never compares the log-probs that they were sampled with with other ones of this model. A loss without such values, like
`sft`, and one of pairs, like `dpo`, does not assume that the rows are those of the current policy.

What is followed is where numbers come from. A ratio, a weight, a mask or a penalty on the distance of two policies is
made from both their log-probs by an operator that compares; a product with an advantage is not, although the advantage
may be made from the log-probs that were sampled with, as where a KL penalty is part of the reward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Flag, auto

from rldsl.diag import Diagnostic, Label
from rldsl.graph import model as g
from rldsl.plan.expr import Program, nodes_under


class Origin(Flag):
    """What a number is made from."""

    NOTHING = 0
    SAMPLED = auto()  # log-probs of the policy that sampled
    MODEL = auto()  # other log-probs of the trained model: as it is before the call, or as it is being trained
    COMPARED = auto()  # both, by an operator that compares them


def uncorrected(graph: g.Graph) -> Iterator[Diagnostic]:
    """RL0909."""
    for train, made, read in _unaware(graph, lambda n: n.id in graph.ahead or n.per_step > 0):
        why = "`lag`" if made.id in graph.ahead else "`per_step`"
        yield Diagnostic(
            "RL0909", f"this loss takes responses of an earlier `{train.model}` for those of the current one",
            train.span, read, (Label(made.span, f"with {why}, the parameters that sample them are older"),),
            help=_help(made), severity="warning")


def uncorrected_engines(graph: g.Graph, engines: Mapping[str, str]) -> Iterator[Diagnostic]:
    """RL0912. engines: id of a generate whose log-probs are another engine's -> its backend. A correction for a lag is
    one for the engine, too."""
    for train, made, read in _unaware(graph, lambda n: n.id in engines and n.id not in graph.ahead):
        yield Diagnostic(
            "RL0912", f"this loss takes responses that {engines[made.id]} samples for those of `{train.model}` in "
            "training", train.span, read,
            (Label(made.span, f"the probabilities of {engines[made.id]} are not exactly those of training"),),
            help=_help(made), severity="warning")


def _help(made: g.Generate) -> str:
    return ("give it the log-probs of the policy that sampled, such as "
            f"`old={made.draws_as}.logprobs`, or multiply the advantage by a weight of `std.correction`")


def _unaware(graph: g.Graph, other: Callable[[g.Generate], bool]) -> Iterator[tuple[g.Train, g.Generate, str]]:
    """Each training whose loss does not compare, the generate whose rows it trains on, and what it reads of it. other:
    whether a generate samples from another policy than the one that is trained."""
    every = tuple(g.nodes(graph.items))
    made_from = _made_from(every)
    programs = {p.id: p for p in graph.programs}
    earlier = {n.frame: n for n in every if isinstance(n, g.Generate) and other(n)}
    for node in every if earlier else ():
        if not isinstance(node, g.Train) or len(node.frames) != 1 or not node.data_inputs:
            continue
        rows = _closure([f"{node.frames[0]}.tokens"], made_from)
        for frame, made in earlier.items():
            if made.model != node.model or f"{frame}.tokens" not in rows:
                continue
            found = _of_loss(node, programs, _origins(every, programs, node.model, frame))
            if Origin.COMPARED in found:
                continue
            name = f"`{made.draws_as}.logprobs`"
            yield node, made, (f"it reads {name}, but compares them with no log-probs of `{node.model}`"
                               if Origin.SAMPLED in found else f"it does not read {name}")
            break


def _origins(every: Sequence[g.Node], programs: Mapping[str, Program], model: str, frame: str) -> dict[str, Origin]:
    """Of each value what it is made from. model: that is trained. frame: its rows, as they were generated."""
    models = {model, *(n.model for n in every if isinstance(n, g.Sync))}  # a model that follows may stand for it
    found = {f"{frame}.logprobs": Origin.SAMPLED}
    for node in every:
        if isinstance(node, g.Infer):
            own = node.output_name == "logprobs" and node.model in models
            found[node.value] = Origin.MODEL if own else Origin.NOTHING
        elif isinstance(node, g.Derive | g.Collect):
            for value, becomes in node.values:
                found[becomes] = found.get(becomes, Origin.NOTHING) | found.get(value, Origin.NOTHING)
        elif isinstance(node, g.Compute):
            inputs = {name: found.get(value, Origin.NOTHING) for name, value in node.inputs}
            origins, outputs = _of_nodes(programs[node.program], inputs), dict(programs[node.program].outputs)
            found |= {value: origins[outputs[name]] for name, value in node.outputs}
        else:
            read = Origin.NOTHING
            for value in node.reads:
                read |= found.get(value, Origin.NOTHING)
            for value in node.writes:
                found.setdefault(value, read)
    return found


def _of_loss(node: g.Train, programs: Mapping[str, Program], origins: Mapping[str, Origin]) -> Origin:
    """What the loss is made from."""
    program = programs[node.loss]
    inputs = {name: origins.get(value, Origin.NOTHING) for name, value in node.data_inputs}
    inputs |= {name: Origin.MODEL for name, _, what in node.model_outputs if what in ("logprobs", "logprobs_at")}
    each, found = _of_nodes(program, inputs), Origin.NOTHING
    for i in nodes_under(program.nodes, [dict(program.outputs)["loss"]]):
        found |= each[i]
    return found


def _of_nodes(program: Program, inputs: Mapping[str, Origin]) -> list[Origin]:
    """What each node of a program is made from. inputs: the same of its inputs."""
    both, found = Origin.SAMPLED | Origin.MODEL, list[Origin]()
    for node in program.nodes:
        if node.op == "input":
            found.append(inputs.get(str(node.attr("name")), Origin.NOTHING))
            continue
        args, own = [found[i] for i in node.args], Origin.NOTHING
        for origin in args:
            own |= origin
        # the sum of two means says nothing of a row; `exp(a) * exp(-b)` is a ratio
        compares = len(args) > 1 and node.op != "mul" and node.level != "batch" and both in own
        if compares or node.op == "exp" and Origin.SAMPLED in own:
            own |= Origin.COMPARED
        found.append(own)
    return found


def _made_from(every: Iterable[g.Node]) -> dict[str, tuple[str, ...]]:
    """Of each value those that it is made from. What only carries rows over, one by one."""
    found: dict[str, tuple[str, ...]] = {}
    for node in every:
        if isinstance(node, g.Derive | g.Collect):
            for value, becomes in node.values:
                found[becomes] = (*found.get(becomes, ()), value)
        for value in node.writes:
            found.setdefault(value, node.reads)
    return found


def _closure(values: Iterable[str], made_from: Mapping[str, tuple[str, ...]]) -> frozenset[str]:
    """Some values, and all that they are made from within a step."""
    found, waiting = set[str](), list(values)
    while waiting:
        if (value := waiting.pop()) not in found:
            found.add(value)
            waiting += made_from.get(value, ())
    return frozenset(found)
