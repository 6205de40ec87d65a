"""`rlc emit`: a plan as a Python program that runs under torchrun, for stepping through with a debugger.

In: the path of a plan, and a rank or all. Out: the text of the program: a function for each list of events, real loops,
one line an event (`run.generate(8)`), with what it is in a comment. The lines call
`rldsl.runtime.interpreter.emitted_program`, which executes the events of the plan; the program holds their numbers and
the plan's id, and no logic. Errors: RL0608 no such rank, and those of reading and verifying a plan."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import PurePath

from jinja2 import Environment, StrictUndefined

from rldsl.files import read_bytes
from rldsl.inspect.view import check_rank
from rldsl.pages.templates import template
from rldsl.plan.codec import decode, plan_id
from rldsl.plan.events import EVERY_ITERATION, Event, Item, Loop, When, ahead_of
from rldsl.plan.model import Plan, Ranges
from rldsl.plan.naming import describe_event, labelled
from rldsl.plan.notation import ranks_text
from rldsl.plan.projection import schedule, to_ranges
from rldsl.verify import verify

WIDTH, CALL = 120, 36  # columns of a line, and of the call before its comment
TEMPLATE = "program.py.j2"


@dataclass(frozen=True, slots=True)
class Schedule:
    """One function of the emitted program."""

    name: str  # of the function
    doc: str  # its docstring
    ranks: Ranges  # that follow it
    lines: tuple[str, ...]  # its body, indented


def emit(file: str, rank: int | None, target: str | None = None) -> str:
    """file: of the plan. rank: whose list; None: all, a function for the ranks that do the same. target: where the
    program goes, for its own instructions."""
    data = read_bytes(file)
    plan = decode(data, file)
    verify(plan)
    if rank is not None:
        check_rank(plan, rank)
    plan = labelled(plan)
    schedules = tuple(_schedules(plan, rank))
    per_node = max(1, min(plan.header.world, plan.header.devices_per_node))
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
                              keep_trailing_newline=True)
    return environment.from_string(template(TEMPLATE)).render(
        program=_plain(plan.header.program), plan=plan_id(data), file=file, rank=rank, schedules=schedules,
        nproc=per_node, nodes=-(-plan.header.world // per_node), quoted=_plain(shlex.quote(file)), text=json.dumps,
        name=_plain(shlex.quote(target or f"{PurePath(file).stem}_ranks.py")))


def _plain(text: str) -> str:
    """For comments and docstrings: a plan that somebody else wrote must not end either and bring in code."""
    return "".join("'" if c == '"' else c if c.isprintable() and c != "\\" else "?" for c in text)


def _schedules(plan: Plan, rank: int | None) -> Iterator[Schedule]:
    """Ranks with the same events share a function, whatever memory they need."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for c in plan.classes:
        alike.setdefault(c.events, []).extend(r for a, b in c.ranks for r in range(a, b))
    for events, found in alike.items():
        ranks = [rank] if rank is not None else sorted(found)
        if rank is None or rank in found:
            first = ranks[0]
            doc = f"Rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)}: {len(events)} events."
            lines = tuple(_lines(schedule(plan.body, plan.meshes, first), 1, ()))
            yield Schedule(_name(to_ranges(ranks)), doc, to_ranges(ranks), lines)


def _name(ranks: Ranges) -> str:
    (start, stop), *more = ranks
    if not more:
        return f"rank_{start}" if stop == start + 1 else f"ranks_{start}_to_{stop - 1}"
    return f"ranks_{start}_and_others"


def _lines(items: Sequence[Item], depth: int, loop_variables: tuple[str, ...]) -> Iterator[str]:
    """loop_variables: those of the loops around, outermost first; an `every` is in one."""
    indent = "    " * depth
    for item in items:
        if isinstance(item, Loop):
            variable = _loop_variable(len(loop_variables))
            yield f'{indent}for {variable} in run.loop({json.dumps(item.id)}):{_about(item)}'
            placed = tuple(_with_blocks(item.body)) if item.first < 1 else tuple((i, ()) for i in item.body)
            for condition, group in groupby(placed, partial(_condition, item, variable)):
                if condition:
                    yield f"{indent}    if {condition}:"
                own = tuple(i for i, _ in group)
                yield from _lines(own, depth + 1 + bool(condition), (*loop_variables, variable))
        elif isinstance(item, When):
            yield f"{indent}if {_runs(item, loop_variables[-1]) or 'True'}:"
            yield from _lines(item.body, depth + 1, loop_variables)
        else:
            yield _line(item, indent)


def _loop_variable(depth: int) -> str:
    """"step" for the step loop, then "iteration", "iteration2", ... for the loops inside it."""
    return f"iteration{depth if depth > 1 else ''}" if depth else "step"


def _with_blocks(items: Sequence[Item], blocks: tuple[When, ...] = ()) -> Iterator[tuple[Item, tuple[When, ...]]]:
    """The items of a step loop with a lag, and the blocks around each that say for which steps it runs."""
    for item in items:
        if isinstance(item, When):
            yield from _with_blocks(item.body, (*blocks, item))
        else:
            yield item, blocks


def _runs(block: When, variable: str) -> str:
    """When a block runs; "" for always."""
    parts = [f"{variable} % {block.period} == 0"] if block.period > 1 else []
    parts += [f"{variable} > {block.after}"] if block.after else []
    parts += [f"{variable} <= {block.first}"] if block.first else []
    return " and ".join(parts)


def _condition(loop: Loop, variable: str, placed: tuple[Item, tuple[When, ...]]) -> str:
    """When an item of a loop runs; "" in every iteration. With a lag, the first and the last iterations lack some
    items, and blocks count the steps for which their items run."""
    item, blocks = placed
    ahead = ahead_of(item)
    if loop.first == 1 or ahead == EVERY_ITERATION and not blocks:
        return ""
    if ahead == EVERY_ITERATION:
        ways = [_due(variable, a, blocks) for a in blocks[-1].aheads]
        return " or ".join(ways if len(ways) == 1 else map("({})".format, ways))
    return _due(variable, ahead, blocks)


def _due(variable: str, ahead: int, blocks: Sequence[When]) -> str:
    step = f"({variable} + {ahead})" if ahead else variable
    return " and ".join(filter(None, (f"run.is_due({variable}, ahead={ahead})", *(_runs(b, step) for b in blocks))))


def _about(loop: Loop) -> str:
    if loop.first < 1:
        return f"  # from {loop.first} to {loop.trips}: some events run for a later step"
    return _plain(f"  # {f'at most {loop.trips}' if loop.until or loop.over else loop.trips} times" + (
        f", until {loop.until}" if loop.until else f", over the rows of {loop.over}" if loop.over else ""))


def _line(event: Event, indent: str) -> str:
    call = f"{indent}run.{event.kind}({event.id})"
    text = f"{call:<{CALL}}  # {_plain(describe_event(event).sentence)}"
    return text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"
