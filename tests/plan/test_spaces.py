"""What follows from the records of spaces: chains, numbers of rows, and where numbers come from."""

from __future__ import annotations

from itertools import product

import pytest

from rldsl.plan.model import Frame, Space
from rldsl.plan.spaces import IndexedFrame, indexed, spaces_of

TREE = (Space("prompt", 4), Space("gen", 12, "prompt", 3), Space("cuts", 24, "gen", 2),
        Space("kept.prompt", 4, of="prompt"), Space("kept", 12, "kept.prompt", 3, of="gen"),
        Space("few.kept.prompt", 4, of="kept.prompt"), Space("few", 12, "few.kept.prompt", 3, of="kept"),
        Space("prompt.all", 8, iterations=2), Space("gen.all", 24, "prompt.all", 3))


def frame(space: str, *spaces: Space) -> IndexedFrame:
    return indexed(Frame(f"{space} frame", space, "d", 8, 8), {s.id: s for s in spaces or TREE})


def test_rows_and_prompts() -> None:
    gen, prompt, cuts = frame("gen"), frame("prompt"), frame("cuts")
    assert (gen.count, gen.per_prompt, gen.prompt_space, gen.iterations) == (12, 3, "prompt", 1)
    assert (prompt.count, prompt.per_prompt, prompt.prompt_space) == (4, 1, "prompt"), "a root's rows are its prompts"
    assert (cuts.per_prompt, cuts.prompt_space) == (2, "gen"), "one step up"
    assert [s.id for s in cuts.chain] == ["cuts", "gen", "prompt"]


def test_numbers_come_from_what_was_selected_from() -> None:
    few = frame("few")
    assert (few.row_origin, few.prompt_origin, few.prompt_space) == ("gen", "prompt", "few.kept.prompt")
    assert frame("gen").origins == ("gen", "prompt")


def test_the_root_has_the_iterations_of_all() -> None:
    assert frame("gen.all").iterations == 2 == frame("prompt.all").iterations
    assert frame("gen.all").row_origin == "gen.all", "what is collected has numbers of its own"


def test_records_come_back_parents_first() -> None:
    frames = [frame("cuts"), frame("gen"), frame("kept")]
    assert [s.id for s in spaces_of(frames)] == ["prompt", "gen", "cuts", "kept.prompt", "kept"]
    assert frames[0].record == Frame("cuts frame", "cuts", "d", 8, 8) and type(frames[0].record) is Frame


def test_what_contradicts_itself_has_an_end() -> None:
    """The verifier looks at such frames before it refuses them."""
    assert frame("a", Space("a", 2, "b"), Space("b", 2, "a", of="b")).origins == ("a", "b")
    assert frame("nowhere").count == 1 and frame("nowhere").prompt_space == "nowhere"
    assert [s.id for s in frame("a", Space("a", 2, "lost")).chain] == ["a"]


@pytest.mark.parametrize(("iterations", "count", "fan"), [(1, 1, 1), (3, 4, 2), (2, 5, 3), (4, 1, 5)])
def test_iterations_nest(iterations: int, count: int, fan: int) -> None:
    """Row r of iteration t of a collected space belongs to the row that its parent in that iteration became."""
    whole = frame("c.all", Space("p.all", iterations * count, iterations=iterations),
                  Space("c.all", iterations * count * fan, "p.all", fan))
    for t, r, j in product(range(iterations), range(count), range(fan)):
        child = t * count * fan + r * fan + j
        assert child // whole.per_prompt == t * count + r and child // (count * fan) == t
