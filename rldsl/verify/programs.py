"""Programs are well formed and bound to values that fit.

In: tables with sound references. Out: diagnostics RL0616 (program malformed) and RL0617 (bound to the wrong values).
Rules: arguments come first; operators are those of `plan/operators.py` with their arity; a result is never coarser than
an argument unless a reduction makes it so; a node's space exists and covers those of its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, assert_never

from rldsl.diag import Diagnostic
from rldsl.plan import arrays
from rldsl.plan.arrays import ARRAYS
from rldsl.plan.entries import vocabulary_space
from rldsl.plan.events import Compute, Draw, Event, Sample, Train
from rldsl.plan.expr import LEVELS, Node, Program
from rldsl.plan.function import frames_of_call
from rldsl.plan.heads import OUTPUTS, SKIPPED, STOP, UPDATES
from rldsl.plan.model import Value
from rldsl.plan.operators import OPERATORS, Operator
from rldsl.plan.references import Role, references
from rldsl.plan.traits import rule_for
from rldsl.verify.row_states import check_weight
from rldsl.verify.tables import Tables, name, problem


def check_programs(t: Tables) -> Iterator[Diagnostic]:
    """What uses programs is looked at when they are well formed."""
    found = [*_malformed(t)]
    yield from found
    for event, _ in t.events if not found else ():
        if any(r.role is Role.PROGRAM for r in references(event)):
            yield from rule_for(RULES, event, "the verifier")(t, event)


def well_formed(t: Tables, program: Program) -> bool:
    """Whether a program has no node with RL0616. Checks of the same stage that look at arguments ask first."""
    return not any(_fault(t, program, index, node) for index, node in enumerate(program.nodes))


def _malformed(t: Tables) -> Iterator[Diagnostic]:
    for program in t.plan.programs:
        for index, node in enumerate(program.nodes):
            if fault := _fault(t, program, index, node):
                yield problem(
                    "RL0616",
                    f"program {program.id}, node {index} ({node.op}): {fault}",
                    notes=(program.at,) if program.at else (),
                )
                break  # nodes after it may rely on what it lacks
        names = [n for n, _ in program.outputs]
        if len({*names}) != len(names) or any(not 0 <= i < len(program.nodes) for _, i in program.outputs):
            yield problem("RL0616", f"program {program.id} has outputs {program.outputs} of {len(program.nodes)} nodes")


def _fault(t: Tables, program: Program, index: int, node: Node) -> str:
    """What is wrong with a node, or ""."""
    if any(program.nodes[a].op in ARRAYS for a in node.args if 0 <= a < index):
        return "it calculates with an array, which only the log reads"
    if any(not 0 <= a < index for a in node.args):
        return f"its arguments {node.args} do not come before it"
    args = [program.nodes[a] for a in node.args]
    operator = OPERATORS.get(node.op)
    if operator is None:
        return "unknown operator"
    if operator.arity != len(args):
        return f"{len(args)} arguments"
    if not _has_space(t, node.level, node.space):
        return f"space {node.space!r} does not have the level {node.level}"
    match operator.family:
        case "elementwise":
            if node.level != "batch" and all(a.level == "batch" for a in args):
                return f"a {node.level} value of batch-level arguments only"
            return next((f for a in args if (f := _broadcast(t, a, node))), "")
        case "reduction":
            coarser = LEVELS.index(node.level) < LEVELS.index(args[0].level) or \
                node.level == args[0].level == "seq" and node.space != args[0].space
            if args[0].level == "entry" and not t.entries[args[0].space].width and (
                    node.level != "token" or operator.combine == "gather"):
                return "what ranges over the whole vocabulary is reduced to tokens first"
            if node.attr("to") != node.level or not coarser:
                return f"reduces {args[0].level} to {node.attr('to')}, but its result is at level {node.level}"
            if any(a.level != "batch" for a in args[1:]):
                return f"the further arguments of a {node.op} are numbers of the batch"
            return _broadcast(t, node, args[0], reduced=True)
        case "order":
            return _order_fault(t, node, args[0])
        case "sequence":
            return _sequence_fault(t, operator, node, args)
        case "rows":
            return _rows_fault(t, node, args)
        case "random":
            if node.op == "step":
                return "" if node.level == "batch" else "the number of the step is one number"
            fits = node.level != "batch" and node.attr("call") and isinstance(node.attr("call"), str)
            return "" if fits else "random numbers need elements and a call"
        case "array":
            return _array_fault(t, node, args)
        case "leaf":
            return _leaf_fault(t, node)
        case family:
            assert_never(family)


def _order_fault(t: Tables, node: Node, x: Node) -> str:
    within, of = node.attr("within"), str(node.attr("of"))
    if (node.level, node.space) != (x.level, x.space) or within not in LEVELS:
        return f"orders {x.level} of {x.space!r} within {within!r} as {node.level} of {node.space!r}"
    if x.level == "entry" and not t.entries[x.space].width:
        return "what ranges over the whole vocabulary has no order"
    if node.op == "across" and (x.level != "token" or within in ("batch", "turn")):
        return f"adds up {x.level} values across {within}: only tokens, across the responses to a prompt"
    coarser = LEVELS.index(within) < LEVELS.index(x.level) or within == x.level == "seq" and of != x.space
    if not coarser or not _has_space(t, within, of):
        return f"orders a {x.level} value within the {within} space {of!r}"
    return _broadcast(t, Node("input", level=within, space=of), x, reduced=True)


def _sequence_fault(t: Tables, operator: Operator, node: Node, args: Sequence[Node]) -> str:
    levels = tuple(a.level for a in args)
    if node.level == "turn" and (operator.takes[:1], operator.gives) == (("token",), "token"):  # over turns instead
        levels = tuple("token" if x == "turn" else x for x in levels)
        node = replace(node, level="token")
    if (levels, node.level) != (operator.takes, operator.gives):
        return f"takes {operator.takes} to {operator.gives}, not {levels} to {node.level}"
    fine, coarse = (args[0], node) if node.op == "last" else (node, args[0]) if args else (node, node)
    frame = t.frames.get(str(node.attr("frame") or (args[0].space if args else "")))
    if frame is None or node.space != (frame.id if node.level == "token" else frame.row_space):
        return f"does not belong to the sequences of {node.attr('frame') or node.space!r}"
    if any(a.level == "token" and a.space != args[0].space for a in args[1:]):
        return "its arguments belong to different tokens"
    return _broadcast(t, coarse, fine)


def _rows_fault(t: Tables, node: Node, args: Sequence[Node]) -> str:
    """Operators that relate rows to other rows."""
    of, result = (args[0].level, args[0].space), (node.level, node.space)
    if node.op == "over":
        wanted, given = _origin_of(t, args[0].space), _origin_of(t, node.space)
        selected = args[0].space != node.space and wanted == given != ""
        if args[0].level != node.level or node.level not in ("seq", "prompt") or not selected:
            return f"{args[0].space!r} is not a selection of {node.space!r}"
        return "" if args[1].level == "batch" else "its default is not one number"
    frames = [f for f in t.frames.values() if f.row_space == args[0].space and len(f.chain) > 1]
    if args[0].level != "seq" or not frames:
        return f"takes values of rows that have siblings, not {args[0].level} values of {args[0].space!r}"
    if node.op == "along":
        frame = t.frames.get(str(node.attr("frame")))
        if (args[1].level, args[1].space) != of:
            return "its arguments are of different rows"
        fits = frame is not None and result == ("token", frame.id) and any(
            f.origins[1] == frame.row_origin for f in frames)
        return "" if fits else f"its result is not of the tokens of which {args[0].space!r} are prefixes"
    if len(args) > 1 and args[1].level != "batch":
        return "its factor is not one number"
    if node.op == "last_row":
        fits = node.space == frames[0].prompt_space and node.level in ("seq", "prompt")
        return "" if fits else f"its result is not of what the rows of {args[0].space!r} belong to"
    return "" if result == of else f"its result is not of {args[0].space!r}"


def _origin_of(t: Tables, space: str) -> str:
    """The space in which a space has the same numbers, selected or not; "" of one that no row lies in."""
    return next((f.origins[i] for f in t.frames.values() for i, s in enumerate(f.chain) if s.id == space), "")


def _leaf_fault(t: Tables, node: Node) -> str:
    if node.op == "input" and not isinstance(node.attr("name"), str):
        return "an input without a name"
    if node.op == "const" and node.attr("value") is None:
        return "a constant without a value"
    if node.op == "py":
        function = t.functions.get(str(node.attr("function")))
        if function is None or node.attr("frame") not in t.frames:
            return f"unknown function {node.attr('function')!r} or frame {node.attr('frame')!r}"
        rows = t.frames[str(node.attr("frame"))]
        if node.space != (rows.prompt_space if node.level == "prompt" else rows.row_space):
            return f"{function.id} gives a result for each row of {rows.id}, not of {node.space!r}"
        above = [s.id for s in rows.chain]
        for argument, frame in frames_of_call(node.attrs):
            if frame not in t.frames or t.frames[frame].row_space not in above:
                return f"argument {argument or 'rows'} of {function.id}: the rows of {rows.id} do not lie in {frame!r}"
        if function.returns != node.level:
            return f"{function.id} returns {function.returns}, not {node.level}"
    return ""


def _array_fault(t: Tables, node: Node, args: Sequence[Node]) -> str:
    """What the log gets of the whole batch: a histogram, or a part of a table."""
    if node.level != "batch" or node.attr("to") != "batch":
        return f"several numbers of the level {node.level}"
    if wrong := arrays.fault(node):
        return wrong
    if node.op == arrays.HISTOGRAM:
        (x,) = args
        whole = x.level == "entry" and not t.entries[x.space].width
        return f"a histogram of {'the whole vocabulary' if whole else x.level}" if whole or x.level == "batch" else ""
    frame = t.frames.get(str(node.attr("frame")))
    if frame is None:
        return f"unknown frame {node.attr('frame')!r}"
    for x in args:
        if (x.level, x.space) != ("seq", frame.row_space):
            return f"{x.level} values of {x.space!r} are no column of a table of {frame.id!r}"
    return ""


def _has_space(t: Tables, level: str, space: str) -> bool:
    match level:
        case "batch":
            return space == ""
        case "prompt":
            return any(f.prompt_space == space for f in t.frames.values())
        case "seq":
            return any(f.row_space == space for f in t.frames.values())
        case "turn":
            return space in t.frames and t.frames[space].max_turns > 0
        case "entry":
            return space in t.entries
    return space in t.frames


def _broadcast(t: Tables, coarse: Node, fine: Node, reduced: bool = False) -> str:
    """Why `coarse` cannot be spread over `fine`, or "". reduced: `coarse` is what `fine` is reduced to."""
    if LEVELS.index(coarse.level) > LEVELS.index(fine.level):
        return f"a {coarse.level} value cannot become a {fine.level} value without a reduction"
    if coarse.level == "batch":
        return ""
    if coarse.level == fine.level and coarse.space == fine.space:
        return ""
    if coarse.level == "turn" and coarse.space == fine.space:
        return ""
    if fine.level == "entry":  # of the tokens of a frame
        fine = replace(fine, level="token", space=t.entries[fine.space].frame)
        return "" if (coarse.level, coarse.space) == ("token", fine.space) else _broadcast(t, coarse, fine, reduced)
    if coarse.level == fine.level != "seq" or coarse.level == "turn":
        return f"spaces {coarse.space} and {fine.space} differ"
    of = [f for f in t.frames.values() if fine.space == (f.id if fine.level in ("turn", "token") else f.row_space)]
    above = _origin_of(t, coarse.space) if reduced else coarse.space  # a selection reduces to the rows of its source
    fits = any(above in (f.origins if reduced else [s.id for s in f.chain]) for f in of)
    return "" if fits else f"space {coarse.space} does not cover {fine.space}"


def _compute(t: Tables, e: Compute) -> Iterator[Diagnostic]:
    program = t.programs[e.program]
    yield from _bound(t, e, program, {n for n, _ in e.inputs}, len(e.inputs))
    for input, value in e.inputs:
        yield from _fits(t, e, program, input, t.values[value])
    frames = [t.frames[f] for f in e.frames]
    known = {"batch": {""}, "prompt": {f.prompt_space for f in frames}, "seq": {f.row_space for f in frames},
             "turn": {*e.frames}, "token": {*e.frames},
             "entry": {x for x, of in t.entries.items() if of.frame in e.frames}}
    strange = [n.space for n in program.nodes if n.space not in known[n.level]
               or n.level == "entry" and not t.entries[n.space].width]
    strange += [str(n.attr("frame")) for n in program.nodes if n.attr("frame") and n.attr("frame") not in e.frames]
    if strange:
        yield problem("RL0617",
                      f"{name(e)}: program {program.id} uses {strange[0]}, but the event uses "
                      f"{', '.join(e.frames) or 'no frame'}", e)
    outputs = dict(program.outputs)
    truths = _truths(program, {n for n, v in e.inputs if t.values[v].dtype == "bool"})
    for output, value in e.outputs:
        if output not in outputs:
            yield problem("RL0617", f"{name(e)}: program {program.id} has no output {output}", e)
        else:
            yield from _alike(t, e, output, program.nodes[outputs[output]], t.values[value])
            made = "bool" if truths[outputs[output]] else "f32"
            if t.values[value].dtype != made:
                yield problem("RL0617", f"{name(e)}: {output} is {made}, but {value} is {t.values[value].dtype}", e)
    if not e.outputs:
        yield problem("RL0617", f"{name(e)} computes nothing", e)


def _train(t: Tables, e: Train) -> Iterator[Diagnostic]:
    program = t.programs[e.loss]
    yield from _bound(t, e, program, {n for n, _, _ in e.model_outputs} | {n for n, _ in e.data_inputs},
                      len(e.model_outputs) + len(e.data_inputs))
    for input, value in e.data_inputs:
        yield from _fits(t, e, program, input, t.values[value])
    for node in program.nodes:
        for input, frame, what in e.model_outputs:
            level = OUTPUTS[what].level
            entries = e.ids or vocabulary_space(frame)
            space = t.frames[frame].row_space if level == "seq" else entries if level == "entry" else frame
            if (
                node.op == "input"
                and node.attr("name") == input
                and (node.level, node.space) != (level, space)
            ):
                yield problem(
                    "RL0617",
                    f"{name(e)}: input {input} has level {node.level} of {node.space}, but must be {what} of {frame}", e
                )
    for op in sorted({n.op for n in program.nodes if not OPERATORS[n.op].in_loss}):
        yield problem("RL0617",
                      f"{name(e)}: program {program.id} has {op}, which cannot be accumulated over micro-batches", e)
    outputs = dict(program.outputs)
    if "loss" not in outputs:
        yield problem("RL0617", f"{name(e)}: program {program.id} has no output named loss", e)
    for output, index in outputs.items():
        if program.nodes[index].level != "batch":
            yield problem("RL0617", f"{name(e)}: output {output} of {program.id} is not at batch level", e)
    if STOP in outputs and not _truths(program, {*program.inputs()})[outputs[STOP]]:  # a loss's inputs may be any
        yield problem("RL0617", f"{name(e)}: output stop of {program.id} is not a condition", e)
    known = outputs.keys() - {STOP} | {"grad_norm", "lr"} | ({UPDATES} if STOP in outputs else set())
    known |= {SKIPPED} if e.nonfinite == "skip" else set()
    for metric, _ in e.outputs:
        if metric not in known:
            yield problem("RL0617", f"{name(e)}: program {program.id} has no metric {metric}", e)


def _truths(program: Program, given: set[str]) -> Sequence[bool]:
    """For each node of a program that is well formed, whether its elements are truth values. given: inputs whose
    are."""
    found: list[bool] = []
    for node in program.nodes:
        match node.op:
            case "input":
                found.append(node.attr("name") in given)
            case "const":
                found.append(isinstance(node.attr("value"), bool))
            case op:
                kept = OPERATORS[op].keeps_truth and all(found[a] for a in node.args[-2:])
                found.append(OPERATORS[op].condition or kept)
    return found


def _bound(t: Tables, e: Event, program: Program, given: set[str], count: int) -> Iterator[Diagnostic]:
    wanted = {*program.inputs()}
    if given != wanted or count != len(given):
        yield problem(
            "RL0617", f"{name(e)}: program {program.id} takes {sorted(wanted)}, but gets {sorted(given)}", e
        )


def _fits(t: Tables, e: Event, program: Program, input: str, value: Value) -> Iterator[Diagnostic]:
    for node in program.nodes:
        if node.op == "input" and node.attr("name") == input:
            yield from _alike(t, e, input, node, value)


def _alike(t: Tables, e: Event, slot: str, node: Node, v: Value) -> Iterator[Diagnostic]:
    space, wide = _space(t, v), arrays.width(node, t.frames)
    if (v.extent == arrays.EXTENT) != (node.op in ARRAYS) or node.op in ARRAYS and v.width != wide:
        yield problem("RL0617", f"{name(e)}: {slot} has {wide} numbers, but {v.id} is of extent {v.extent} and has "
                      f"{v.width}", e)
    if v.level == "entry" and v.dtype == "i64":
        yield problem("RL0617", f"{name(e)}: {slot} would calculate with {v.id}, which has the ids of tokens", e)
    if (v.level, space) != (node.level, node.space):
        yield problem(
            "RL0617",
            f"{name(e)}: {slot} has level {node.level} of {node.space!r}, but {v.id} has level {v.level} of {space!r}",
            e,
        )


def _space(t: Tables, v: Value) -> str:
    match v.level:
        case "batch":
            return ""
        case "prompt":
            return t.frames[v.frame].prompt_space
        case "seq":
            return t.frames[v.frame].row_space
        case "entry":
            return v.entries
    return v.frame


# How each kind of event that names a program binds it.
RULES: Mapping[type[Event], Callable[[Tables, Any], Iterator[Diagnostic]]] = {
    Compute: _compute, Train: _train, Draw: check_weight, Sample: check_weight,
}
