"""Which share of the rows of a micro-batch compute their prompt, where those of one prompt compute it once.

In: a call of a plan and the rows of its micro-batches. Out: a number from 0 to 1. Rows of one prompt are neighbors
(`sharding/siblings.py`), except where a shuffle has divided them into minibatches.
"""

from __future__ import annotations

from collections.abc import Sequence

from rldsl.plan.events import ModelCall
from rldsl.plan.model import Spread
from rldsl.plan.prompt_sources import pays, shares_prompts
from rldsl.simulate.lengths import Row
from rldsl.simulate.world import World


def computed_prompts(world: World, call: ModelCall, frames: Sequence[str], rows: float) -> float:
    """frames: whose rows the call computes. rows: of a micro-batch. 1 where each row computes its own, of several
    frames too."""
    sources = [world.prompts.get(f) for f in frames]
    known = [s for s in sources if s is not None]
    if not (world.cluster.prompts_once and rows) or len(known) < len(frames) or len({s.frame for s in known}) > 1 \
            or not shares_prompts(world.models[call.model], world.layouts[call.layout]):
        return 1.0
    run = _together(world.spreads[call.spread], max(s.run for s in known))
    share = min(max(1.0 / run, 1.0 / rows), 1.0) / len(frames)
    each = [world.row(f) for f in frames]
    prompts = sum(row.prompt for row in each)
    return share if pays(rows * prompts * (1 - share), rows * _tokens(each)) else 1.0


def image_tokens(world: World, call: ModelCall, frames: Sequence[str], rows: float) -> float:
    """Tokens that a vision tower makes for a micro-batch of `rows` rows of each frame; a prompt that several rows have
    counts once."""
    found: dict[str, float] = {}  # of each source of prompts
    for frame in frames if world.images else ():
        source = world.prompts.get(frame)
        name, run = (source.frame, source.run) if source is not None else (frame, 1)
        prompts = max(rows / _together(world.spreads[call.spread], run), min(rows, 1.0))
        found[name] = max(found.get(name, 0.0), prompts * of_a_prompt(world, world.row(frame)))
    return sum(found.values())


def of_a_prompt(world: World, row: Row) -> float:
    """Tokens of the images of a prompt: as many as the data allows, since nobody has read the rows. 0: no rows have
    images."""
    return min(row.prompt, float(world.images))


def _tokens(rows: Sequence[Row]) -> float:
    return sum(row.tokens for row in rows)


def _together(spread: Spread, run: int) -> float:
    """Rows of a prompt, on average, that a minibatch has of those prompts that it has any of."""
    if not spread.shuffle or spread.minibatches == 1 or spread.granularity == "prompt":
        return run
    part = 1 / spread.minibatches  # of the rows; the chance that a row is in this minibatch
    return run * part / (1 - (1 - part) ** run)
