"""Log: the metrics of each block, at its end.

In: a draft. Out: the same with one Log in every block that writes metrics. Invariant: each metric is logged once, in
the block that writes its value.
"""

from __future__ import annotations

from dataclasses import replace

from rldsl.passes.draft import Draft, each_block
from rldsl.placement.model import mesh_of
from rldsl.plan.events import Event, Item, Log, Transfer, split_buffer
from rldsl.plan.model import Mesh

TO = 0  # the rank that prints


def log(draft: Draft) -> Draft:
    meshes: list[Mesh] = []

    def append(items: tuple[Item, ...]) -> tuple[Item, ...]:
        made = {split_buffer(b)[0]: b for e in items if isinstance(e, Event) and not isinstance(e, Transfer)
                for b in e.writes}
        metrics = tuple((name, made[value]) for name, value in draft.placed.graph.metrics if value in made)
        if not metrics:
            return items
        buffers = tuple(dict.fromkeys(b for _, b in metrics))
        mesh = mesh_of([TO, *(draft.meshes[draft.spreads[split_buffer(b)[1]].mesh].members()[0] for b in buffers)])
        meshes.append(mesh)
        return (*items, Log(id=0, mesh=mesh.id, reads=buffers, because="the metrics of the step", bytes=-1,
                            metrics=metrics, to=TO))

    body = each_block(draft.body, append)
    return replace(draft, body=body).with_meshes(*meshes)
