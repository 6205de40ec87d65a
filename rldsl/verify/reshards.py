"""Every `realloc` moves what it states, and its destination gets every parameter exactly once.

In: tables with sound references. Out: diagnostics RL0526 (bytes, messages or digest differ from what the ranks will
do), RL0527 (a destination has a gap or an overlap, or a rank receives what it has), RL0533 (what one rank sends is not
what the other expects, or it does not have it then) and RL0535 (too many messages at once). The `ReshardPlan` is the
one that every rank computes (`rldsl/reshard`). It is not trusted: `box_classes.py` checks its boxes and
`transfer_slices.py` its ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rldsl.diag import Diagnostic
from rldsl.plan.events import Realloc
from rldsl.plan.model import Layout, Mesh, Model
from rldsl.reshard.planning import plan_reshard
from rldsl.reshard.summary import Summary, joined, summary
from rldsl.sharding.boxes import itemsize
from rldsl.sharding.dtypes import in_wire_dtypes
from rldsl.verify import box_classes, transfer_slices
from rldsl.verify.reshard_records import Fault
from rldsl.verify.tables import Tables, name, problem
from rldsl.verify.transfer_slices import MeshCells


def check_reshards(t: Tables) -> Iterator[Diagnostic]:
    examined: dict[tuple[str, str, str, str, bool], tuple[Summary, Sequence[Fault]]] = {}
    for event, _ in t.events:
        if isinstance(event, Realloc):
            key = (event.model, event.source, event.src, event.dst, event.decay > 0)
            if key not in examined:
                src, dst = t.layouts[event.src], t.layouts[event.dst]
                # Layouts of equal ranks may name different meshes; the planner wants each layout's own.
                where = (src, t.meshes[src.mesh], dst, t.meshes[dst.mesh], t.plan.header.devices_per_node,
                         t.plan.header.world)
                parts = [examine_reshard(part, *where) for part in in_wire_dtypes(
                    t.models[event.origin], src.id, t.models[event.model], dst.id, event.decay)]
                examined[key] = joined([total for total, _ in parts]), [x for _, faults in parts for x in faults]
            yield from _diagnostics(t, event, *examined[key])


def examine_reshard(model: Model, src: Layout, src_mesh: Mesh, dst: Layout, dst_mesh: Mesh,
                    devices: int, world: int) -> tuple[Summary, Sequence[Fault]]:
    """What the ranks do, and what is wrong with it. model: in the dtype that is sent. devices: per node. world: ranks
    of the run."""
    plan = plan_reshard(model, src, src_mesh, dst, dst_mesh, devices)
    total = summary(plan, model)
    faults: list[Fault] = list(box_classes.class_faults(model, src, dst, plan.classes))
    if not faults:  # otherwise the box classes say nothing about boxes
        src_cells, dst_cells = MeshCells.of(src, src_mesh), MeshCells.of(dst, dst_mesh)
        faults += transfer_slices.slice_faults(plan, src_cells, dst_cells, world)
        missing = transfer_slices.missing_elements(plan.classes, src_cells, dst_cells) * itemsize(model)
        if missing != total.bytes:
            faults.append(("RL0526",
                           f"{total.bytes} bytes are counted, but {missing} bytes are missing on the destination", ()))
    return total, faults


def _diagnostics(t: Tables, e: Realloc, total: Summary, faults: Sequence[Fault]) -> Iterator[Diagnostic]:
    if (e.bytes, e.messages, e.digest) != (total.bytes, total.messages, total.digest):
        yield problem(
            "RL0526",
            f"{name(e)} records {e.bytes} bytes in {e.messages} messages, but moving {e.model} from {e.src} to {e.dst} "
            f"takes {total.bytes} bytes in {total.messages} messages"
            + ("" if e.digest == total.digest else ", and the digest of its paths differs"),
            e,
            ranks=t.event_ranks(e),
        )
    for code, what, ranks in faults:
        yield problem(code, f"{name(e)}: {what}", e, ranks=ranks)
