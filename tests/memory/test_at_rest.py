"""What a rank holds between calls is counted once for layouts that divide it alike: no layout gets another's count."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from rldsl.memory.parameters import Copy, boxes, held, resting
from rldsl.plan.model import Layout
from rldsl.sharding.boxes import cells, volume
from tests.search.programs import cluster, instance


def test_elements_are_those_of_the_boxes_of_the_layout_itself() -> None:
    model = instance("ppo", "7B", cluster(1, 8)).problem.models["actor"]
    found = set()
    for dp, tp, pp, cp, zero, vpp in product((1, 2, 4), (1, 2), (1, 2), (1, 2), (0, 1, 2, 3), (1, 2)):
        layout = Layout(f"x.{dp}.{tp}.{pp}.{cp}.{zero}.{vpp}", "m", dp=dp, tp=tp, pp=pp, cp=cp, zero=zero,
                        vpp=vpp if pp > 1 else 1)
        for trained in (model, replace(model, train_layout=layout.id)):
            for cell in (c for stage in range(pp) for c in cells(layout, stage) if not c.zero_shard):
                copy = Copy(trained, layout, cell)
                parts = [(s, boxes(s, layout, cell.part, rest=True)) for s in model.params]
                assert resting(copy) == sum(len(held(s, copy)) * sum(map(volume, b)) for s, b in parts)
                found.add(resting(copy))
    assert len(found) > 12  # dp under zero, tp and pp make differences
