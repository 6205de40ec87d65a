"""Spaces form trees whose counts fit, and frames lie in them.

In: tables, perhaps with unknown names. Out: diagnostics RL0610 (unknown) and RL0612 (malformed). Rules: none is its own
ancestor or selection; a root that concatenates other spaces has the rows of one after those of another; a space has
`fan` rows for each row of its parent; a selection has the numbers of what it is selected from, and its parent is
selected from that one's parent. A frame over a selected space is a selection itself, of a frame over the space that its
space is selected from, or has the rows of such a frame; a frame over another space is none. The frame that says which
rows are present lies in the rows or above them."""

from __future__ import annotations

from collections.abc import Iterator

from rldsl.diag import Diagnostic
from rldsl.plan.model import Frame, Space
from rldsl.plan.spaces import MAX_DEPTH
from rldsl.verify.tables import Tables, problem


def check_spaces(t: Tables) -> Iterator[Diagnostic]:
    spaces = {s.id: s for s in t.plan.spaces}
    for s in t.plan.spaces:
        if unknown := [x for x in (s.parent, s.of, *(p for p, _ in s.parts)) if x and x not in spaces]:
            yield problem("RL0610", f"space {s.id} refers to an unknown space {unknown[0]!r}")
        elif fault := _space(s, spaces):
            yield problem("RL0612", f"space {s.id} {fault}")
    selections = {f.row_space for f in t.plan.frames if f.selected_from or f.picked_from}
    for f in t.plan.frames:
        if f.row_space not in spaces:
            yield problem("RL0610", f"frame {f.id} refers to an unknown space {f.row_space!r}")
        elif fault := _frame(f, spaces[f.row_space], t, selections):
            yield problem("RL0612", f"frame {f.id} {fault}")


def _space(s: Space, spaces: dict[str, Space]) -> str:
    """What is wrong with a space, or ""."""
    if min(s.count, s.fan, s.iterations) < 1:
        return f"has {s.count} rows, {s.fan} for each of its parent, {s.iterations} iterations"
    for link, what in (("parent", "its own ancestor"), ("of", "a selection of itself")):
        if _is_endless(s, link, spaces):
            return f"is {what}, or more than {MAX_DEPTH} spaces lead up from it"
    if not s.parent and (s.fan != 1 or s.count % s.iterations):
        return f"has {s.count} rows in {s.iterations} iterations and a fan of {s.fan}, but no parent"
    if s.parent and (s.iterations != 1 or s.count != spaces[s.parent].count * s.fan):
        return f"has {s.count} rows, which are not {s.fan} for each of the {spaces[s.parent].count} of {s.parent}"
    if s.parts and (fault := _parts(s, spaces)):
        return fault
    if not s.of:
        return ""
    of = spaces[s.of]
    if (s.count, s.fan, s.iterations) != (of.count, of.fan, of.iterations):
        return f"numbers its rows differently from {of.id}, from which it is selected"
    above = spaces[s.parent].of if s.parent else ""
    return "" if above == of.parent else f"lies below {s.parent!r}, but {of.id}, from which it is selected, does not"


def _parts(s: Space, spaces: dict[str, Space]) -> str:
    """What is wrong with a space that concatenates others, or ""."""
    if s.parent or s.of or s.iterations != 1:
        return "concatenates the rows of others, but is no root, or is a selection or a collection"
    first = 0
    for part, number in s.parts:
        if number != first:
            return f"has the rows of {part} from {number} on, not from {first}"
        first += spaces[part].count
    if first != s.count or len(s.parts) < 2:
        return f"has {s.count} rows, but its {len(s.parts)} parts have {first}"
    roots = {_root(p, spaces) for p, _ in s.parts}
    return "" if len(roots) == len(s.parts) else "concatenates rows that come from the same rows"


def _root(id: str, spaces: dict[str, Space]) -> str:
    """The root from which the rows of a space come, selected or not."""
    for _ in range(2 * MAX_DEPTH):
        space = spaces.get(id)
        if space is None or not (space.parent or space.of):
            break
        id = space.of or space.parent
    return id


def _is_endless(s: Space, link: str, spaces: dict[str, Space]) -> bool:
    """Whether following a link from a space comes back to a space, or does not end within the bound. Links to unknown
    spaces end."""
    id = s.id
    for _ in range(MAX_DEPTH + 1):
        if id not in spaces:
            return False
        id = getattr(spaces[id], link)
    return True


def _frame(f: Frame, space: Space, t: Tables, selections: set[str]) -> str:
    """What is wrong with where a frame lies, or "". selections: the row spaces of selections and picks."""
    of = t.frames.get(f.selected_from)
    if f.picked_from:
        return _picked(f, t)
    if space.of and not f.selected_from and f.row_space in selections:
        return _present(f, t)  # text about a selection or a pick from one, or its whole sequences
    if bool(f.selected_from) != bool(space.of) or of is not None and of.row_space != space.of:
        return f"is selected from {f.selected_from!r}, but its space {space.id} from {space.of!r}"
    return _present(f, t)


def _picked(f: Frame, t: Tables) -> str:
    """A frame that has one row for each prompt of another: its space is that one's prompt space."""
    source = t.frames.get(f.picked_from)
    if f.selected_from or source is not None and source.prompt_space != f.row_space:
        return f"is picked from {f.picked_from!r}, but its rows are not the prompts of that frame alone"
    return _present(f, t)


def _present(f: Frame, t: Tables) -> str:
    present, chain = t.frames.get(f.present_in), t.frames[f.id].chain
    if present is not None and present.row_space not in [s.id for s in chain]:
        return f"has rows that are present as in {present.id}, to whose rows they do not belong"
    return ""
