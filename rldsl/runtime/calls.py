"""Events on models: load, realloc, offload, onload, generate, infer, train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from rldsl.plan.model import Generate, Infer, Load, Offload, Onload, Realloc, Train
from rldsl.plan.movement import realloc_moves
from rldsl.plan.partition import micro_batches
from rldsl.runtime.backend import Packed
from rldsl.runtime.evaluate import LossRun, View, loss_counts
from rldsl.runtime.exchange import Place, Route, copies_of, realloc
from rldsl.runtime.rows import Lens
from rldsl.runtime.state import State
from rldsl.runtime.store import Column


def load(state: State, event: Load) -> None:
    state.shard(event.model, event.layout, load=True)


def reallocate(state: State, event: Realloc) -> None:
    """Issued here, waited for by the first call that uses the new copy."""
    model, world = state.models[event.model], state.world
    src, dst = world.layouts[event.src], world.layouts[event.dst]
    src_mesh, dst_mesh = world.meshes[src.mesh], world.meshes[dst.mesh]
    if event.id not in state.routes:
        moves = realloc_moves(model, src, src_mesh, dst, dst_mesh, state.plan.header.devices_per_node)
        state.routes[event.id] = Route.of(moves, world.rank, copies_of(model, src, src_mesh, dst, dst_mesh, world.rank))
    here = [(layout, mesh) for layout, mesh in ((src, src_mesh), (dst, dst_mesh)) if world.rank in mesh.members()]
    places = {layout.id: Place.of(model, layout, mesh, world.rank, state.shard(model.name, layout.id).tensors())
              for layout, mesh in here}
    dtype = torch.bfloat16 if model.dtype == "bfloat16" else torch.float32
    pending = realloc(state.routes[event.id], places.get(src.id), places.get(dst.id), dtype, state.device, event.id * 16)
    if (model.name, dst.id) in state.arriving:  # nobody used the copy that came before
        state.arriving.pop((model.name, dst.id)).finish()
    state.arriving[model.name, dst.id] = pending
    if world.rank not in dst_mesh.members():
        state.arriving.pop((model.name, dst.id)).finish()


def offload(state: State, event: Offload) -> None:
    state.settled(event.model, event.layout).to(torch.device("cpu"))


def onload(state: State, event: Onload) -> None:
    state.settled(event.model, event.layout).to(state.device)


def generate(state: State, event: Generate) -> None:
    spread, record = state.spreads[event.spread], state.frames[event.frame]
    rows = state.my_rows(spread, event.frame)
    asked = rows // record.per_prompt
    lens = state.rows.lens[event.prompts].prompt[asked]
    tokens = state.read(event.reads, f"{event.prompts}.tokens")
    prompts = Packed(rows, lens, torch.zeros_like(lens), _repeated(tokens, asked))
    made = state.settled(event.model, event.layout).generate(prompts, event.sampling, seed=state.sampling_seed(event),
                                                             step=state.step - 1, limit=event.mbs)
    whole = Lens(*(torch.zeros(record.count, dtype=torch.int64, device=state.device) for _ in range(2)))
    whole.prompt[rows], whole.response[rows] = lens, made.batch.response_lens
    state.rows.lens[event.frame] = whole  # of the own rows only, until the lengths are exchanged
    for name, data in (("tokens", made.batch.tokens), ("logprobs", made.logprobs), ("finished", made.finished)):
        state.write(f"{event.frame}.{name}", spread.id, rows, data)


def _repeated(tokens: Column, prompts: torch.Tensor) -> torch.Tensor:
    """The tokens of each prompt, as often as it is asked for. prompts ascend."""
    if not prompts.numel():
        return tokens.data[:0]
    starts = tokens.sizes.cumsum(0) - tokens.sizes
    return torch.cat([tokens.data[starts[p] : starts[p] + tokens.sizes[p]] for p in prompts.tolist()])


def infer(state: State, event: Infer) -> None:
    spread = state.spreads[event.spread]
    rows = state.my_rows(spread, event.frame)
    totals = state.rows.lens[event.frame].of("tokens").tolist()
    tokens = state.read(event.reads, f"{event.frame}.tokens")
    pp = state.world.layouts[event.layout].pp
    parts = [torch.tensor(p, device=state.device) for p in micro_batches(rows.tolist(), totals, event.mbs, pp)]
    batches = [state.packed(event.frame, tokens, part) for part in parts]
    result = state.settled(event.model, event.layout).infer(batches, event.what, event.temperature)
    order = torch.cat(parts) if parts else rows
    sizes = state.rows.sizes(state.values[event.output], order)
    split = [Column(part, size, data) for part, size, data in _by_part(parts, sizes, result)]
    joined = Column.join(split) if split else Column(order, sizes, result)
    state.write(event.output, spread.id, joined.ids, joined.data)


def _by_part(parts: Sequence[torch.Tensor], sizes: torch.Tensor, data: torch.Tensor):
    counts = [len(p) for p in parts]
    amounts = [int(s.sum()) for s in sizes.split(counts)]
    return zip(parts, sizes.split(counts), data.split(amounts))


# ------------------------------------------------------------------------------------------------- training


def train(state: State, event: Train) -> None:
    """minibatches * epochs optimizer steps; metrics are exact over each minibatch and averaged over them."""
    spread, layout = state.spreads[event.spread], state.world.layouts[event.layout]
    shard, axes = state.settled(event.model, event.layout), state.world.axes(layout)
    program, frames = state.programs[event.loss], {f: state.frames[f] for f in event.frames}
    responses = {f: state.rows.lens[f].response.tolist() for f in event.frames}
    totals = [sum(x) for x in zip(*(state.rows.lens[f].of("tokens").tolist() for f in event.frames))]
    tokens = {f: state.read(event.reads, f"{f}.tokens") for f in event.frames}
    data = {name: state.read(event.reads, value) for name, value in event.data}
    what = [[kind for _, frame, kind in event.fresh if frame == f] for f in event.frames]
    runs, steps = [], []
    for epoch in state.rows.schedule(spread):
        for minibatch in epoch:
            run = LossRun(program, loss_counts(program, frames, sorted(r for s in minibatch for r in s), responses))
            parts = [torch.tensor(p, device=state.device) for p in
                     micro_batches(minibatch[axes.dp.index], totals, event.mbs, axes.pp.size)]
            batches = [tuple(state.packed(f, tokens[f], rows) for f in event.frames) for rows in parts]

            def loss(i: int, fresh: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
                views = {f: View(parts[i], parts[i] // frames[f].per_prompt, state.rows.lens[f].response[parts[i]])
                         for f in event.frames}
                inputs = {name: fresh[event.frames.index(f)][kind] for name, f, kind in event.fresh}
                inputs |= {name: _data(state, value, data[name], parts[i]) for name, value in event.data}
                return run(inputs, views)

            steps.append(shard.train(batches, what, state.frames[event.frames[0]].temperature, loss))
            runs.append(run)
    own = axes.tp.index == 0 and axes.pp.index == axes.pp.size - 1
    metrics = finish(runs, own, axes.mesh.group, state.device)
    mean = {name: sum(m[name] for m in metrics) / len(metrics) for name in metrics[0]}
    mean["grad_norm"] = sum(s["grad_norm"] for s in steps) / len(steps)
    mean["lr"] = steps[-1]["lr"]
    at = torch.zeros(1, dtype=torch.int64, device=state.device)
    for name, value in event.outputs:
        state.write(value, spread.id, at, torch.tensor([mean[name]], dtype=torch.float64, device=state.device))


def _data(state: State, value: str, column: Column, rows: torch.Tensor) -> torch.Tensor:
    record = state.values[value]
    if record.extent == "batch":
        return column.data[0]
    if record.extent == "prompt":
        rows = (rows // state.frames[record.frame].per_prompt).unique()
    return column.pick(rows).data


def finish(runs: Sequence[LossRun], own: bool, group: object, device: torch.device) -> list[dict[str, float]]:
    """The metrics of every minibatch, from one all-reduce of sums and one of maxima over the mesh. own: whether this
    rank's partials count (its rows are on other ranks too)."""
    table = torch.stack([run.partials(device) for run in runs])
    sums = runs[0].sums
    if not own:
        table[:, :sums] = 0
        table[:, sums:] = -torch.inf
    added, largest = table[:, :sums].contiguous(), table[:, sums:].contiguous()
    if group is not None:
        dist.all_reduce(added, group=group)
        if largest.numel():
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return [run.finish(row) for run, row in zip(runs, torch.cat([added, largest], 1))]
