"""The full state of a run on disk, written during the run: complete under its name, or not there at all.

`OUT/checkpoints/step-000100/` holds one safetensors file for each rank that had something to write, whose tensors are
boxes of global tensors, and `checkpoint.json`, written last: step, plan, states, data positions and what they mean
(`runtime/data/read_positions.py`), schedules, the size and sha256 of every file, and a digest of all this
(`manifest.py`). So it can be read under any layout (`checkpoint_reader.py`). Each box is written by one of the ranks
that hold it, and nothing is gathered. The names of the tensors:

- `MODEL|PART|PARAMETER|START:STOP,...`, with the parts "param", "exp_avg" and "exp_avg_sq";
- `STATE|state|rows|0:COUNT`, of states of rows;
- `rows of buffer|NAME|FIELD|START:STOP`, of replay buffers (`state/replay.py`);
- `later step|STEP|VALUE|...`, of what was generated ahead of later steps (`state/in_flight.py`);
- `carried|FRAME|VALUE|...`, of responses that the next step continues (`state/carried.py`).

A step waits only for the copy to host memory; a thread writes. The first rank gives the directory its name when every
rank has reported to the store of the process group, in a directory next to it that no other run uses.
Errors: RL0706 it cannot be written (found at the next checkpoint, or at the end of the run).
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
import torch.distributed as dist

from rldsl import threads
from rldsl.diag import Diagnostic, Failure
from rldsl.plan.events import Checkpoint, split_buffer
from rldsl.plan.model import Layout, Mesh, Model
from rldsl.plan.optimizers import COMPLETE_STATE
from rldsl.plan.projection import event_paths
from rldsl.runtime.checkpoint_files import MANIFEST, checkpoints
from rldsl.runtime.comm.agreement import any_rank
from rldsl.runtime.files import digest, sync
from rldsl.runtime.host_memory import HostMemory
from rldsl.runtime.persist.manifest import FORMAT, OPTIONAL, manifest_text
from rldsl.runtime.persist.run_identity import program_identity
from rldsl.runtime.state import carried, in_flight
from rldsl.runtime.state.context import RunContext
from rldsl.runtime.state.data_reader import DataReader
from rldsl.runtime.state.model_store import ModelStore
from rldsl.runtime.state.replay import ReplayRows
from rldsl.runtime.state.step import StepState
from rldsl.sharding.boxes import Box, Parameter, Piece, holdings, local_slice, parameters

_KEY = "rldsl/checkpoint"


def checkpoint_directory(out: Path, step: int) -> Path:
    return out / "checkpoints" / f"step-{step:06d}"


def box_text(box: Box) -> str:
    return ",".join(f"{a}:{b}" for a, b in box)


def row_state_key(state: str) -> str:
    """What the numbers of a state of rows are called, without their box. The name of no model has a dot."""
    return f"{state}|state|rows"


def checkpoint(models: ModelStore, step: StepState, data: DataReader, writer: CheckpointWriter, event: Checkpoint,
               timeouts: int = 0) -> bool:
    """Agree with the other ranks whether the run was asked to stop, which is returned; begin to write a checkpoint
    where one is due, and where the run ends early. timeouts: conversations that a time limit ended on this rank."""
    context = models.context
    due = step.number % event.every == 0 or bool(event.until) and bool(step.buffers.get(event.until).data)
    if due:
        writer.join()
    votes = (writer.stop_requested(), writer.problem is not None)
    stop, failed = any_rank(votes, context.world.group(event.mesh), context.device)
    if failed:
        raise writer.failure()
    if stop and not due:
        writer.join()
    if due or stop:
        tensors = _tensors(models, writer, event) | _row_states(step, event) | _buffers(step)
        tensors |= in_flight.tensors(step.begun, context.rank) | carried.tensors(context, step.carried)
        counted = {OPTIONAL: {str(context.rank): timeouts} if timeouts else {}}
        writer.begin(step.number, event.keep_last, tensors, _facts(models, step, data, event) | counted)
    return stop


def open_writer(context: RunContext, plan: str, watchdog: Any = None) -> CheckpointWriter:
    """Create the writer of this rank, before the first step. plan: its id. watchdog: knows whether this rank was asked
    to stop."""
    store = dist.distributed_c10d._get_default_store()
    store = store.clone() if hasattr(store, "clone") else store  # another thread uses it
    store = dist.PrefixStore(_KEY, store)
    if context.rank == 0:
        store.set("token", token_hex(4))
    token = store.get("token").decode()
    writer = CheckpointWriter(context.out, plan, program_identity(context.plan), store, context.rank,
                              dist.get_world_size(), token, HostMemory(context.device))
    if watchdog is not None:
        watchdog.stops_after_step, writer.stop_requested = True, lambda: watchdog.stop_requested
    return writer


def _tensors(models: ModelStore, writer: CheckpointWriter, event: Checkpoint) -> dict[str, torch.Tensor]:
    """Copies of the boxes that this rank writes."""
    context = models.context
    written: dict[str, torch.Tensor] = {}
    for name, layout in map(split_buffer, event.reads):
        where = context.world.layouts.get(layout)
        if name not in context.models or where is None or (name, layout) not in models.shards:
            continue
        model, mesh, rank = context.models[name], context.world.meshes[where.mesh], context.rank
        if rank not in mesh.members():
            continue
        shard = models.shard_to_read(name, layout)
        parts = {"param": shard.state_dict(), **(shard.optimizer_state() if model.train_layout == layout else {})}
        if (name, layout) not in writer.mine:
            writer.mine[name, layout] = owned_pieces(model, where, mesh, rank)
        for parameter, piece in writer.mine[name, layout]:
            for part, tensors in parts.items():
                stored = _stored_part(parameter, piece, part, tensors.get(parameter.name))
                if stored is not None:
                    box, view = stored
                    written[f"{name}|{part}|{parameter.name}|{box_text(box)}"] = view
    return writer.memory.copies(written)


def _stored_part(parameter: Parameter, piece: Piece, part: str,
                 tensor: torch.Tensor | None) -> tuple[Box, torch.Tensor] | None:
    """What the writer of a piece stores of one part: a box, and the tensor that is in it; None where there is nothing.
    What is complete on every rank belongs to the piece at the parameter's origin."""
    if tensor is None:
        return None
    if part in COMPLETE_STATE:
        return (complete_box(tensor), tensor) if all(start == 0 for start, _ in piece.box) else None
    return piece.box, tensor[local_slice(piece, piece.box, parameter.dim)]


def complete_box(tensor: torch.Tensor) -> Box:
    return tuple((0, n) for n in tensor.shape)


def _row_states(step: StepState, event: Checkpoint) -> dict[str, torch.Tensor]:
    """Copies of the states of rows that this rank writes: the first of those that hold one."""
    context = step.context
    copies: dict[str, torch.Tensor] = {}
    for state in context.plan.states:
        buffer = f"{state.value}@{state.spread}"
        members = context.world.meshes[context.spreads[state.spread].mesh].members()
        if state.data and buffer in event.reads and context.rank == members[0]:
            numbers = step.buffers.get(buffer)
            copies[f"{row_state_key(state.value)}|{box_text(((0, len(numbers)),))}"] = numbers.clone()
    return copies


def _buffers(step: StepState) -> dict[str, torch.Tensor]:
    """The rows of replay buffers that this rank writes; a row never changes, so nothing is copied."""
    context, out = step.context, dict[str, torch.Tensor]()
    for record in context.plan.buffers:
        ranks = context.world.meshes[context.spreads[record.spread].mesh].members()
        rows: ReplayRows = step.buffers.get(f"{record.value}@{record.spread}")
        out |= rows.share(ranks.index(context.rank), len(ranks))
    return out


def owned_pieces(model: Model, layout: Layout, mesh: Mesh, rank: int) -> tuple[tuple[Parameter, Piece], ...]:
    """The pieces that a rank writes: the ranks that hold the same pieces take turns by parameter."""
    return tuple((parameter, piece) for i, parameter in enumerate(parameters(model))
                 for share in holdings(parameter, model.layers, layout, mesh)
                 if share.ranks[i % len(share.ranks)] == rank for piece in share.pieces)


def _facts(models: ModelStore, step: StepState, data: DataReader, event: Checkpoint) -> dict[str, Any]:
    """What else the next step needs, as far as this rank knows it."""
    records = models.context.models
    reads = [(b, *split_buffer(b)) for b in event.reads]
    numbers = {s.value for s in models.context.plan.states if not s.data}  # the others are tensors
    states = {value: float(step.buffers.get(b).data) for b, value, _ in reads
              if value in numbers and models.context.holds(b)}
    progress = {name: dict(models.shards[name, layout].schedule_state()) for _, name, layout in reads
                if name in records and records[name].train_layout == layout and (name, layout) in models.shards}
    readings = {name: asdict(reading) for name, reading in data.readings.items()}
    return {"states": states, "data": dict(data.position), "readings": readings, "models": progress}


class CheckpointWriter:
    """A rank's checkpoints; one at a time is being written. token: of this start of the run, in names of what is not
    finished. memory: of what is being written. problem: why the last one could not be written here."""

    def __init__(self, out: Path, plan: str, header: Mapping[str, Any], store: Any, rank: int, world: int, token: str,
                 memory: HostMemory):
        self.out, self.plan, self.header, self.store = out, plan, header, store
        self.rank, self.world, self.token, self.memory = rank, world, token, memory
        self.problem: str | None = None
        self.mine: dict[tuple[str, str], tuple[tuple[Parameter, Piece], ...]] = {}  # model, layout -> what it writes
        self.stop_requested: Callable[[], bool] = lambda: False  # whether this rank was asked to end the run (SIGTERM)
        self._thread: threading.Thread | None = None

    def begin(self, step: int, keep: int, tensors: dict[str, torch.Tensor], facts: dict[str, Any]) -> None:
        self._thread = threading.Thread(target=self._write, args=(step, keep, tensors, facts), name="rldsl-checkpoint",
                                        daemon=True)
        threads.start(self._thread, f"rank {self.rank}")

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def finish(self, context: RunContext) -> None:
        """Wait for the last checkpoint; every rank learns when it could not be written."""
        self.join()
        last = next(e for e, _ in event_paths(context.plan) if isinstance(e, Checkpoint))
        if any_rank((self.problem is not None,), context.world.group(last.mesh), context.device)[0]:
            raise self.failure()

    def failure(self) -> Failure:
        if self.problem is None:
            return Failure([])  # another rank reports the error
        return Failure([Diagnostic("RL0706", f"the checkpoint cannot be written: {self.problem}",
                                   place=str(self.out / "checkpoints"),
                                   help="check the path, its permissions and the free disk space; earlier checkpoints "
                                        "are intact")])

    def _write(self, step: int, keep: int, tensors: dict[str, torch.Tensor], facts: dict[str, Any]) -> None:
        """Write a checkpoint, on the writer's thread. Every error is reported to the first rank too, which then leaves
        the directory unnamed."""
        final = checkpoint_directory(self.out, step)
        partial = final.parent / f".{final.name}.{self.token}.partial"
        try:
            report: dict[str, Any] = {"facts": facts, "files": self._file(partial, tensors) if tensors else {}}
        except Exception as error:  # the thread has nobody to raise to, and libraries have their own errors
            self.problem = str(getattr(error, "strerror", None) or error)
            report = {"problem": self.problem}
        try:
            self.store.set(f"{step}/{self.rank}", json.dumps(report))
            if self.rank == 0:
                self._commit(step, keep, partial, final)
        except Exception as error:
            self.problem = str(getattr(error, "strerror", None) or error)

    def _file(self, partial: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        from safetensors.torch import save_file

        partial.mkdir(parents=True, exist_ok=True)
        name = f"rank-{self.rank:05d}.safetensors"
        save_file(tensors, str(partial / name))
        sync(partial / name)
        return {name: {"bytes": (partial / name).stat().st_size, "sha256": digest(partial / name)}}

    def _commit(self, step: int, keep: int, partial: Path, final: Path) -> None:
        reports = []
        for rank in range(self.world):
            reports.append(json.loads(self.store.get(f"{step}/{rank}")))
            self.store.delete_key(f"{step}/{rank}")
        if any("problem" in r for r in reports):
            shutil.rmtree(partial, ignore_errors=True)
            return
        merged: dict[str, dict[str, Any]] = {"files": {}, "states": {}, "data": {}, "readings": {}, "models": {},
                                             OPTIONAL: {}}
        for report in reports:
            merged["files"] |= report["files"]
            for kind, more in report["facts"].items():
                merged[kind] |= more
        partial.mkdir(parents=True, exist_ok=True)
        manifest: dict[str, Any] = {"format": FORMAT, "step": step, "plan": self.plan, **self.header, **merged}
        (partial / MANIFEST).write_text(manifest_text(manifest))
        sync(partial / MANIFEST)
        sync(partial)
        if final.exists():  # of an earlier run that went further; this one has passed the same step again
            shutil.rmtree(final)
        os.replace(partial, final)
        sync(final.parent)
        for old in checkpoints(self.out)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)


def drop_unfinished(out: Path) -> None:
    """Remove unfinished checkpoints of starts that ended while they wrote. No run may be writing there now."""
    for partial in (out / "checkpoints").glob(".step-*.partial"):
        shutil.rmtree(partial, ignore_errors=True)
