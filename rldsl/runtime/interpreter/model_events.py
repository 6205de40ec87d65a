"""Events on models: load, realloc, offload, onload, generate, infer. Training is in `train.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rldsl.plan.events import Generate, Infer, Load, Offload, Onload, Realloc
from rldsl.runtime.backend import PackedBatch
from rldsl.runtime.comm.reshard import Route, Tensors, realloc
from rldsl.runtime.comm.row_assignment import Lens
from rldsl.runtime.interpreter.state import State
from rldsl.runtime.store import Column, Pending, ragged
from rldsl.sharding.dtypes import in_wire_dtype
from rldsl.sharding.partition import micro_batches, num_micro_batches

DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load(state: State, event: Load) -> None:
    """From the directory of the model, or from the checkpoint that the run goes on from; or what another layout has."""
    held, found = (event.model, event.layout), state.resume
    if event.of:  # that one has been filled from the checkpoint, where there is one
        state.shard(*held).alias(state.settled(event.model, event.of))
        return
    if found is None or not found.has(event.model):
        state.shard(*held, load=True)
        return
    model, layout = state.models[event.model], state.world.layouts[event.layout]
    found.fill(model, layout, state.world.meshes[layout.mesh], state.world.rank, state.shard(*held))


def reallocate(state: State, event: Realloc) -> None:
    """Issued here; its last rounds are waited for by the first call that uses the new copy, or changes the old one.
    Earlier movement into either copy is finished first."""
    model, source, world = state.models[event.model], state.models[event.source or event.model], state.world
    src, dst = world.layouts[event.src], world.layouts[event.dst]
    src_mesh, dst_mesh = world.meshes[src.mesh], world.meshes[dst.mesh]
    moved = in_wire_dtype(source, src.id, model, dst.id, event.decay)
    if event.id not in state.routes:
        state.routes[event.id] = Route.of(moved, src, src_mesh, dst, dst_mesh, state.plan.header.devices_per_node,
                                          world.rank)
    sides: list[Tensors | None] = []
    for owner, layout, mesh, there in ((source, src, src_mesh, state.settled),
                                       (model, dst, dst_mesh, state.changeable)):
        if world.rank in mesh.members():
            state.shard(owner.name, layout.id)
            sides.append(there(owner.name, layout.id).state_dict())
        else:
            sides.append(None)
    pending = state.told(realloc(state.routes[event.id], *sides, DTYPE[moved.dtype], state.device, event.id * 16,
                                 event.decay))
    if sides[1] is None:
        pending.finish()
        return
    state.arriving[model.name, dst.id] = pending
    if sides[0] is not None and any(t.dtype == DTYPE[moved.dtype] for t in sides[0].values()):  # others are copied
        state.leaving.setdefault(state.memory(source.name, src.id), {})[event.id] = pending


def offload(state: State, event: Offload) -> None:
    state.changeable(event.model, event.layout).offload(event.what)


def onload(state: State, event: Onload) -> None:
    """Issued here; waited for by what uses it. What still comes into parameters is there before they move; the
    optimizer's part comes behind them, and nothing waits between the two."""
    key = (event.model, event.layout)
    if event.what == "parameters":
        state.settled(*key)
    before, finish = state.arriving.pop(key, None), state.shards[key].onload(event.what)
    state.arriving[key] = Pending(finish if before is None else lambda: (before.finish(), finish()))


def generate(state: State, event: Generate) -> None:
    spread, record = state.spreads[event.spread], state.frames[event.frame]
    rows = state.my_rows(spread, event.frame)
    asked = rows // record.per_prompt
    lens = state.rows.lens[event.prompts].prompt[asked]
    tokens = state.read(event.reads, f"{event.prompts}.tokens")
    prompts = PackedBatch(rows, lens, torch.zeros_like(lens), _repeated(tokens, asked))
    made = state.settled(event.model, event.layout).generate(
        prompts, event.sampling, seed=state.sampling_seed(event), step=state.step - 1, max_num_seqs=event.mbs,
        max_prompt_len=state.frames[event.prompts].max_prompt_tokens)
    whole = Lens(*(torch.zeros(record.count, dtype=torch.int64, device=state.device) for _ in range(2)))
    whole.prompt[rows], whole.response[rows] = lens, made.batch.response_lens
    state.rows.lens[event.frame] = whole  # of the own rows only, until the lengths are exchanged
    for name, data in (("tokens", made.batch.tokens), ("logprobs", made.logprobs), ("finished", made.finished)):
        state.write(f"{event.frame}.{name}", spread.id, rows, data)


def _repeated(tokens: Column, prompts: torch.Tensor) -> torch.Tensor:
    """The tokens of each prompt, as often as it is asked for. prompts ascend."""
    at = torch.searchsorted(tokens.ids, prompts)
    starts = tokens.sizes.cumsum(0) - tokens.sizes
    return tokens.data[ragged(starts, at, tokens.sizes[at])]


def infer(state: State, event: Infer) -> None:
    spread = state.spreads[event.spread]
    rows = state.my_rows(spread, event.frame)
    totals = state.rows.lens[event.frame].of("tokens").tolist()
    tokens = state.read(event.reads, f"{event.frame}.tokens")
    layout = state.world.layouts[event.layout]
    bounds = event.mbs, layout.pp, event.mbt
    parts = [torch.tensor(p, device=state.device) for p in micro_batches(rows.tolist(), totals, *bounds)]
    if layout.ep > 1:  # ranks that share experts make as many passes
        most = max(num_micro_batches(s[event.frame], totals, *bounds) for s in state.rows.shards(spread))
        parts += [torch.zeros(0, dtype=torch.int64, device=state.device)] * (most - len(parts))
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
