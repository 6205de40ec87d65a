"""What a program makes of some rows, with terms instead of numbers: the same term means the same computation.

In: a program, its inputs, the rows of its frames. Out: for each output a `Cell`. Whatever the runtime's evaluator
would choke on, or could only fill with nonsense, is `Garbage`. Written from the meaning of the operators; it knows
nothing of `rldsl.verify`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from zlib import crc32

from rldsl.plan.expr import Node, Program
from rldsl.plan.function import Function, frames_of_call
from rldsl.plan.spaces import IndexedFrame

FINENESS = {"batch": 0, "prompt": 1, "seq": 2, "token": 3}
ELEMENTWISE = {
    1: "neg not exp log expm1 log1p sqrt abs sigmoid logsigmoid stop_gradient".split(),
    2: "add sub mul div pow lt le gt ge eq ne and or min max".split(),
    3: ["where"],
}
TRUTHS = "lt le gt ge eq ne and or not".split()
SIBLINGS = "next_row prev_row cumsum_rows discount_rows at_last_row last_row".split()
ROWS = (*SIBLINGS, "over", "along")
WIDE = "several numbers"  # the space of what only the log reads
REDUCTIONS = "sum mean amax amin count median".split()


class Garbage(Exception):
    """A rank would use what is not there, or something else than was meant."""


def need(condition: object, why: str) -> None:
    if not condition:
        raise Garbage(why)


def term(*parts: object) -> int:
    """A name for a tuple, the same in every process (hashes of integers are not seeded, those of strings are)."""
    return hash(tuple([p if type(p) is int else term(*p) if type(p) is tuple else _code(type(p), p) for p in parts]))


@cache
def _code(kind: type, part: object) -> int:
    return crc32(f"{kind.__name__} {part!r}".encode())


@dataclass(frozen=True, slots=True)
class Cell:
    """of: row (at token level all tokens of it together), prompt, or 0 at batch level -> term."""

    level: str
    space: str
    truth: bool
    of: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class View:
    """The rows of a frame at hand, ascending."""

    frame: IndexedFrame
    rows: tuple[int, ...]

    def above(self, space: str) -> list[int] | None:
        """The rows of a space that its rows lie in; None if they lie in none."""
        each = next((self.frame.count // s.count for s in self.frame.chain if s.id == space), None)
        return None if each is None else sorted({r // each for r in self.rows})


def evaluate(program: Program, inputs: Mapping[str, Cell], views: Mapping[str, View],
             functions: Mapping[str, Function], draw: int) -> dict[str, Cell]:
    """draw: names the random numbers of this call."""
    done: list[Cell] = []
    for node in program.nodes:
        need(all(0 <= a < len(done) for a in node.args), f"{program.id}: an argument that is not computed yet")
        need(all(done[a].space != WIDE for a in node.args), f"{program.id}: arithmetic on several numbers")
        done.append(_node(node, [done[a] for a in node.args], inputs, views, functions, draw))
    need(all(0 <= i < len(done) for _, i in program.outputs), f"{program.id}: an output of no node")
    return {name: done[i] for name, i in program.outputs}


def _node(n: Node, args: Sequence[Cell], inputs: Mapping[str, Cell], views: Mapping[str, View],
          functions: Mapping[str, Function], draw: int) -> Cell:
    ids = _ids(n.level, n.space, views)
    attrs = dict(n.attrs)
    if n.op == "input":
        given = inputs[str(attrs["name"])]
        need((given.level, given.space) == (n.level, n.space), f"input {attrs['name']} is something else")
        need(given.of.keys() >= set(ids) and not args, f"input {attrs['name']} lacks rows")
        return Cell(n.level, n.space, given.truth, {i: given.of[i] for i in ids})
    if n.op == "const":
        value = attrs["value"]
        need(n.level == "batch" and not args and isinstance(value, bool | int | float), "a constant of what?")
        return Cell("batch", "", isinstance(value, bool), {0: term("const", value)})
    if n.op == "py":
        function, frame = functions[str(attrs["function"])], str(attrs["frame"])
        need(function.returns == n.level and not args, "a function that returns something else")
        need(n.level in ("seq", "prompt") and frame in views, "a function of no rows")
        need(_space(views[frame].frame, n.level) == n.space == views[frame].frame.row_space, "a function of other rows")
        what = (function.path, function.name, function.sha256, *map(term, frames_of_call(n.attrs)))
        return Cell(n.level, n.space, False, {i: term("py", what, i) for i in ids})
    if n.op == "uniform":
        need(n.level != "batch" and isinstance(attrs["call"], str) and not args, "random numbers of what?")
        return Cell(n.level, n.space, False, {i: term("uniform", draw, attrs["call"], i) for i in ids})
    if n.op == "step":
        need(n.level == "batch" and not args, "the number of which step?")
        return Cell("batch", "", False, {0: term("step", draw)})
    if n.op in ("histogram", "table_column", "table_rows"):
        return _logged(n, args, views)
    if n.op in REDUCTIONS or n.op == "quantile":
        return _reduced(n, args, views)
    if n.op in ROWS:
        return _related(n, args, ids, views)
    if n.op in ELEMENTWISE.get(len(args), ()):
        need(n.level == "batch" or any(a.level != "batch" for a in args), "numbers that no row has")
        lifted = [_lifted(a, n, ids, views) for a in args]
        truth = n.op in TRUTHS or n.op in ("where", "stop_gradient") and all(a.truth for a in args[-2:])
        op = _code(str, n.op)  # as in `term`, of which these are the most
        return Cell(n.level, n.space, truth, {i: hash((op, *[x[i] for x in lifted])) for i in ids})
    return _sequence(n, args, views)


def _ids(level: str, space: str, views: Mapping[str, View]) -> Sequence[int]:
    if level == "batch":
        need(space == "", "a number with a space")
        return (0,)
    mine = [v for v in views.values() if _space(v.frame, level) == space]
    if mine and level != "prompt":
        return mine[0].rows
    found = [x for v in views.values() if (x := v.above(space)) is not None]
    need(found and level != "token", f"no rows of {space}")
    return sorted({*chain.from_iterable(found)})


def _space(f: IndexedFrame, level: str) -> str:
    return {"token": f.id, "seq": f.row_space, "prompt": f.prompt_space, "batch": ""}[level]


def _over(n: Cell | Node, coarser: str, space: str, views: Mapping[str, View]) -> Mapping[int, int]:
    """Each id of `n` -> the id of the coarser level that it lies in."""
    ids = _ids(n.level, n.space, views)
    if coarser == "batch":
        return dict.fromkeys(ids, 0)
    need(n.level != "prompt", "prompts lie in nothing but the batch")
    each = _rows_per_row([v.frame for v in views.values()], n.level, n.space, space)
    return {i: i // each for i in ids}


def _rows_per_row(frames: Sequence[IndexedFrame], level: str, space: str, above: str) -> int:
    """Rows of a space in each row of another one, which they lie in: themselves, or those that they were selected
    from."""
    for f in frames:
        ids = [s.id for s in f.chain]
        if f.id == space if level == "token" else space in ids:
            start = 0 if level == "token" else ids.index(space)
            for i in range(start, len(ids)):
                same = (s.id for g in frames for s, o in zip(g.chain, g.origins) if o == f.origins[i])
                if above in (ids[i], *same):
                    return f.chain[start].count // f.chain[i].count
    raise Garbage(f"{space} does not lie in {above}")


def _lifted(a: Cell, n: Node, ids: Sequence[int], views: Mapping[str, View]) -> Mapping[int, int]:
    if a.level == n.level and (a.space == n.space or a.level != "seq"):
        need(a.space == n.space, f"{a.space} and {n.space} are different rows")
        return a.of
    fine = (v.frame for v in views.values() if _space(v.frame, n.level) == n.space)
    need(a.level == "batch" or any(a.space == s.id for f in fine for s in f.chain), f"{n.space} is not below {a.space}")
    need(a.level == n.level or FINENESS[a.level] < FINENESS[n.level], f"{a.level} used as {n.level}")
    over = _over(n, a.level, a.space, views)
    return {i: a.of[over[i]] for i in ids}


def _reduced(n: Node, args: Sequence[Cell], views: Mapping[str, View]) -> Cell:
    need(len(args) == (2 if n.op == "quantile" else 1) and n.attr("to") == n.level, "a reduction of nothing")
    a = args[0]
    coarser = FINENESS[n.level] < FINENESS[a.level] or a.level == n.level == "seq" and a.space != n.space
    need(coarser, f"{n.op} from {a.level} to {n.level}")
    need(n.op != "quantile" or args[1].level == "batch", "a quantile of what?")
    over, parts = _over(a, n.level, n.space, views), {i: [] for i in _ids(n.level, n.space, views)}
    for i in sorted(a.of):
        parts[over[i]].append(a.of[i])
    more = tuple(args[1].of.values()) if n.op == "quantile" else ()
    return Cell(n.level, n.space, False, {i: term(n.op, tuple(x), more) for i, x in parts.items()})


def _logged(n: Node, args: Sequence[Cell], views: Mapping[str, View]) -> Cell:
    """A histogram of all elements, the first rows of a frame, or numbers of these. Nothing may calculate with it."""
    need((n.level, n.space, n.attr("to")) == ("batch", "", "batch"), "several numbers of what?")
    if n.op == "histogram":
        bins, low, high = (n.attr(x) for x in ("bins", "low", "high"))
        need(len(args) == 1 and args[0].level != "batch" and isinstance(bins, int) and 1 <= bins <= 512, "no histogram")
        need(low is high is None or isinstance(low, float) and isinstance(high, float) and low < high, "no range")
        return Cell("batch", WIDE, False, {0: term(n.op, bins, low, high, tuple(args[0].of[i] for i in sorted(args[0].of)))})
    view, rows = views[str(n.attr("frame"))], n.attr("rows")
    need(isinstance(rows, int) and 1 <= rows <= 64 and isinstance(n.attr("table"), str), "no table")
    if n.op == "table_rows":
        need(not args, "rows of what?")
        return Cell("batch", WIDE, False, {0: term(n.op, view.frame.id, n.attr("table"), tuple(view.rows[:rows]))})
    need(len(args) == 1 and (args[0].level, args[0].space) == ("seq", view.frame.row_space), "a column of other rows")
    return Cell("batch", WIDE, False, {0: term(n.op, tuple(args[0].of[i] for i in view.rows[:rows]))})


def _sequence(n: Node, args: Sequence[Cell], views: Mapping[str, View]) -> Cell:
    """op -> levels of the arguments, level of the result; the frame is named, or that of the argument."""
    takes, gives = {"next": ("token", "token"), "prev": ("token", "token"), "cumsum": ("token", "token"),
                    "last": ("token", "seq"), "at_end": ("seq", "token"), "discount": ("token batch", "token"),
                    "discount_by": ("token token", "token"),
                    "len": ("", "seq"), "index": ("", "seq"), "prompt_len": ("", "seq")}[n.op]
    frame = str(n.attr("frame") or args[0].space)
    need(" ".join(a.level for a in args) == takes and n.level == gives and frame in views, f"{n.op} of something else")
    of = views[frame].frame
    need(n.space == _space(of, gives) and all(a.space == _space(of, a.level) for a in args), f"{n.op} of other rows")
    rest = tuple(a.of[0] for a in args[1:] if a.level == "batch")
    made = {i: term(n.op, frame, i, *(a.of[i] for a in args if a.level != "batch"), rest) for i in views[frame].rows}
    return Cell(n.level, n.space, n.op in ("next", "prev", "last", "at_end") and args[0].truth, made)


def _related(n: Node, args: Sequence[Cell], ids: Sequence[int], views: Mapping[str, View]) -> Cell:
    """Operators that relate rows to other rows: siblings, a selection and all rows, prefixes and tokens."""
    a = args[0]
    frames = [v.frame for v in views.values()]
    if n.op == "over":
        origin = {s.id: o for f in frames for s, o in zip(f.chain, f.origins)}
        need(a.level == n.level in ("seq", "prompt") and a.space != n.space, "over what is no selection")
        need(a.space in origin and origin[a.space] == origin[n.space] and args[1].level == "batch", "over other rows")
        need(a.of.keys() <= set(ids), "a row of the selection that is not there")
        default = term("default", args[1].of[0])
        return Cell(n.level, n.space, a.truth and args[1].truth, {i: a.of.get(i, default) for i in ids})
    of = next((f for f in frames if f.row_space == a.space and len(f.chain) > 1), None)
    need(of is not None and a.level == "seq", f"{n.op} of rows without siblings")
    families: dict[int, list[int]] = {}
    for i in sorted(a.of):
        families.setdefault(i // of.per_prompt, []).append(i)
    if n.op == "along":
        at, frame = args[1], str(n.attr("frame"))
        need((at.level, at.space) == ("seq", a.space) and n.level == "token" and n.space == frame, "along other rows")
        need(frame in views and of.origins[1] == views[frame].frame.row_origin, "along sequences of other prefixes")
        found = {p: tuple((at.of[i], a.of[i]) for i in rows) for p, rows in families.items()}
        return Cell("token", frame, False, {i: term("along", found.get(i, ())) for i in ids})
    need(len(args) < 2 or args[1].level == "batch", "a factor of what?")
    rest = tuple(x.of[0] for x in args[1:])
    if n.op == "last_row":
        need(n.space == of.prompt_space and n.level in ("seq", "prompt"), "the last of other rows")
        return Cell(n.level, n.space, a.truth, {
            p: term("last", *(a.of[i] for i in families.get(p, ())[-1:])) for p in ids})
    need((n.level, n.space) == (a.level, a.space), f"{n.op} of other rows")
    made = {i: term(n.op, i % of.per_prompt, tuple(a.of[x] for x in rows), rest) for rows in families.values() for i in rows}
    return Cell("seq", n.space, n.op in ("next_row", "prev_row", "at_last_row") and a.truth, made)
