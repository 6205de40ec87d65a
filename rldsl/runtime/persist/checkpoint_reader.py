"""Resuming from a checkpoint, under the same layouts or others.

In: a run's directory, or that of one checkpoint. Out: a `LoadedCheckpoint`, equal on all ranks: the newest checkpoint
whose files are all as they were written. Each rank reads the boxes that it needs, by intersection, whatever ranks wrote
them. A manifest or a file that another program wrote counts as damaged: what is read is checked before it is used.
Errors: RL0760 there is none, RL0761 it is damaged, RL0762 it belongs to another program, RL0766 ranks see different
ones."""

from __future__ import annotations

import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from rldsl.diag import Failure, fail, present
from rldsl.plan.disk_paths import shown
from rldsl.plan.model import Layout, Mesh, Model, ReplayBuffer
from rldsl.plan.notation import ranks_text
from rldsl.plan.optimizers import COMPLETE_STATE, is_quantized
from rldsl.runtime.backend import Shard
from rldsl.runtime.checkpoint_files import MANIFEST, candidates, checkpoints, none_there, step_of
from rldsl.runtime.comm.agreement import any_rank, broadcast_text, gather_texts, ranks_that_differ
from rldsl.runtime.data.read_positions import SourceReading
from rldsl.runtime.files import digest
from rldsl.runtime.persist.checkpoint_writer import complete_box, row_state_key
from rldsl.runtime.persist.manifest import Manifest, read_manifest
from rldsl.runtime.persist.run_identity import program_changes
from rldsl.runtime.state import carried, in_flight
from rldsl.runtime.state.replay import COUNT, LENGTHS, PREFIX, TEMPERATURE, OtherRows, ReplayRows, join_parts
from rldsl.runtime.store import RaggedRows
from rldsl.sharding.boxes import Box, intersect, local_slice, parameters, pieces_of_rank, slices_within, subtract

StoredBoxes = list[tuple[Box, Path, str]]  # box, file, key in it
FLOATS = ("F64", "F32", "F16", "BF16")
CODES = ("U8",)  # of optimizer state with 8 bits
ROWS = ("I64", "F32", "BOOL")  # of the rows of replay buffers, and of ragged values
RAGGED = (in_flight.PREFIX, carried.PREFIX)  # of ragged values, by the first part of a name
DAMAGE = (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint whose files are all as they were written."""

    path: Path                                             # its directory
    step: int                                              # the last step that it contains
    states: Mapping[str, float]                            # state of the program -> value
    data: Mapping[str, int]                                # data source -> the batch read last, from 0
    readings: Mapping[str, SourceReading]                  # data source -> how it was read
    models: Mapping[str, Mapping[str, int]]                # model -> `Shard.schedule_state`
    stored: Mapping[str, StoredBoxes] = field(repr=False)  # "MODEL|PART|PARAMETER" -> boxes, and where each is stored
    timeouts: int = 0                                      # conversations that a time limit ended
    changes: tuple[str, ...] = ()                          # what has changed in the program since, for the user

    @property
    def names(self) -> list[str]:
        """The models, the states of rows and the buffers that it holds."""
        owners = (key.split("|") for key in self.stored)
        return list(dict.fromkeys(name[name[0] == PREFIX] for name in owners if name[0] not in RAGGED))

    def has(self, model: str) -> bool:
        return model in self.names

    def fill_row_state(self, state: str, numbers: torch.Tensor) -> None:
        """Read the numbers of a state of rows. numbers: [rows] float32, overwritten."""
        rows = ((0, len(numbers)),)
        for common, (box, file, key) in self._cover(row_state_key(state), rows):
            with safe_open(file, framework="pt") as opened:
                numbers[slices_within(common, rows)] = opened.get_slice(key)[slices_within(common, box)]

    def has_buffer(self, record: ReplayBuffer) -> bool:
        """Whether it has the rows of a replay buffer, with the same fields. An empty buffer has none."""
        owner = f"{PREFIX}|{record.value}"
        stored = {key.split("|")[2] for key in self.stored if key.startswith(f"{owner}|")}
        needed = {f.name for f in record.fields if f.extent != "response"} if LENGTHS in stored else set[str]()
        return COUNT in stored and needed <= stored <= {COUNT, LENGTHS, TEMPERATURE, *(f.name for f in record.fields)}

    def fields_of_buffer(self, record: ReplayBuffer) -> list[str]:
        """What each row of a replay buffer has in it; [] if it has no such buffer, or no rows of it."""
        keys = (key.split("|") for key in self.stored)
        names = [key[2] for key in keys if key[:2] == [PREFIX, record.value]]
        return [name for name in names if name not in (COUNT, LENGTHS, TEMPERATURE)]

    def fill_buffer(self, rows: ReplayRows) -> None:
        """The rows of a replay buffer, from what all ranks wrote. RL0761, RL0762."""
        owner = f"{PREFIX}|{rows.record.value}|"
        tensors: dict[str, torch.Tensor] = {}
        try:
            for key in (k for k in self.stored if k.startswith(owner)):
                pieces = []
                for box, file, name in self.stored[key]:
                    with safe_open(file, framework="pt") as opened:
                        pieces.append((box[0], opened.get_tensor(name)))
                tensors[key.removeprefix(owner)] = join_parts(pieces)
            rows.restore(tensors)
        except OtherRows as error:
            raise fail("RL0762", f"the rows of `{rows.record.value}` do not fit the program", place=str(self.path),
                       notes=(str(error),), help="resume with the limits and the temperature of the run that wrote "
                       "them, or start a new run with another `--out`") from None
        except DAMAGE as error:
            raise _damaged(self.path, f"buffer {rows.record.value}: {error}") from None

    @property
    def steps_ahead(self) -> set[int]:
        """The later steps of which it holds what was generated ahead."""
        return _steps_ahead(self.stored)

    def earlier(self) -> Iterator[tuple[Path, int, set[int]]]:
        """The older checkpoints of the same run, the newest first: the step of each, and its `steps_ahead`. Those that
        cannot be read are left out."""
        for path in reversed(checkpoints(self.path.parent.parent)):
            if step_of(path) < self.step:
                try:
                    names: list[str] = []
                    for file in sorted(path.glob("*.safetensors")):
                        with safe_open(file, framework="pt") as tensors:
                            names += tensors.keys()
                    yield path, step_of(path), _steps_ahead(names)
                except DAMAGE:
                    continue

    @property
    def frames_carried(self) -> set[str]:
        """The generated frames of which it holds responses that the next step continues."""
        return {key.split("|")[1] for key in self.stored if key.startswith(f"{carried.PREFIX}|")}

    def has_rows_of(self, key: str) -> bool:
        """Whether it holds a value of a later step. key: as of `in_flight.key_of`."""
        return any(name.startswith(f"{key}|") for name in self.stored)

    def damaged(self, why: str) -> Failure:
        """RL0761"""
        return _damaged(self.path, why)

    def rows_of(self, key: str) -> RaggedRows:
        """All rows of a ragged value, from what all ranks wrote. key: all of its name before the part. RL0761."""
        parts: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)  # rank -> part -> tensor
        try:
            for name in (k for k in self.stored if k.startswith(f"{key}|")):
                part, _, rank = name.removeprefix(f"{key}|").partition(".")
                (_, file, stored), = self.stored[name]
                with safe_open(file, framework="pt") as opened:
                    parts[rank][part] = opened.get_tensor(stored)
            rows = RaggedRows.join([RaggedRows(p["ids"], p["sizes"], p["data"]) for p in parts.values()])
            if rows.ids.unique().numel() != rows.ids.numel() or int(rows.sizes.sum()) != rows.data.numel() or (
                    rows.sizes.numel() and int(rows.sizes.min()) < 0):
                raise ValueError("its rows contradict each other")
        except DAMAGE as error:
            raise _damaged(self.path, f"{key.replace('|', ' ')}: {error}") from None
        return rows

    @torch.no_grad()
    def fill(self, model: Model, layout: Layout, mesh: Mesh, rank: int, shard: Shard) -> None:
        """Read the parameters of a shard and, under the training layout, its optimizer state."""
        parts = {"param": shard.state_dict(), **(shard.optimizer_state() if model.train_layout == layout.id else {})}
        with ExitStack() as stack:
            open_files: dict[Path, Any] = {}
            def read(key: str, box: Box, target: torch.Tensor) -> None:
                for common, (stored, file, name) in self._cover(key, box):
                    if file not in open_files:
                        open_files[file] = stack.enter_context(safe_open(file, framework="pt"))
                    value = open_files[file].get_slice(name)[slices_within(common, stored)]
                    target[slices_within(common, box)].copy_(value)

            for parameter in parameters(model):
                pieces = pieces_of_rank(parameter, model.layers, layout, mesh, rank)
                for part, tensors in parts.items():
                    key, tensor = f"{model.name}|{part}|{parameter.name}", tensors.get(parameter.name)
                    if tensor is None:
                        continue
                    if part in COMPLETE_STATE:
                        read(key, complete_box(tensor), tensor)
                        continue
                    for piece in pieces:
                        read(key, piece.box, tensor[local_slice(piece, piece.box, parameter.dim)])
        if model.train_layout == layout.id:
            try:
                shard.load_schedule_state(self.models[model.name])
            except KeyError as error:
                raise _damaged(self.path, f"the checkpoint lacks the count {error} of {model.name}") from None

    def _cover(self, name: str, box: Box) -> list[tuple[Box, tuple[Box, Path, str]]]:
        """Boxes that make up `box`, each with a stored one that contains it."""
        cover: list[tuple[Box, tuple[Box, Path, str]]] = []
        missing = [box]
        for entry in self.stored.get(name, ()):
            if len(entry[0]) != len(box):
                continue
            cover += [(part, entry) for b in missing if (part := intersect(b, entry[0])) is not None]
            missing = [rest for b in missing for rest in subtract(b, entry[0])]
        if missing:
            raise self._incomplete(name)
        return cover

    def _incomplete(self, name: str) -> Failure:
        """name: model|part|parameter, or of a state of rows, of which boxes are missing."""
        model, part, parameter = name.split("|")
        if name == row_state_key(model):
            return fail("RL0762", f"the checkpoint contains only a part of the state `{model}`", place=str(self.path),
                        help="its data has more rows than when it was saved; start a new run")
        if part == "param":
            what = "only a part of" if name in self.stored else "no"
            return fail("RL0762", f"the checkpoint contains {what} parameter `{parameter}` of the model `{model}`",
                        place=str(self.path), help="it was saved from a model with a different shape; start a new run")
        if name in self.stored:
            return fail("RL0762", f"the checkpoint contains only a part of the optimizer state `{part}` of "
                                  f"`{parameter}` of the model `{model}`", place=str(self.path),
                        help="it was saved from a model with a different shape; start a new run")
        same = any(key.startswith(f"{model}|{part}|") for key in self.stored)
        why = ("the parameter was frozen when it was saved, by `freeze` of the optimizer: freeze it again" if same else
               "it was saved with another optimizer: use that one")
        return fail("RL0762", f"the checkpoint contains no optimizer state `{part}` of `{parameter}` of the model "
                              f"`{model}`", place=str(self.path), help=f"{why}, or start a new run from a `save`")


def load_checkpoint(resume: Path, header: Mapping[str, Any], device: torch.device) -> LoadedCheckpoint:
    """resume: a checkpoint, or a run's directory, of which the newest good one counts. header: what the plan says of
    its program (`facts`). All ranks call it together. Rank 0 alone lists the directory: what machines see of a shared
    one may differ for a while, and ranks that tried other checkpoints, or more of them, would not resume from the same
    one."""
    is_checkpoint, names = json.loads(broadcast_text(json.dumps(candidates(resume)), device))
    if not names:
        raise none_there(resume)
    notes: list[str] = []
    for path, before in zip(map(Path, names), [*names[1:], ""], strict=True):
        data = _bytes(path / MANIFEST)
        if other := ranks_that_differ(data, device):
            raise fail("RL0766",
                       f"rank{'s' * (len(other) > 1)} {ranks_text(other)} and rank 0 see different checkpoints",
                       place=str(path / MANIFEST),
                       help="the directories of `--out` and `--resume` must be on a file system shared by all "
                            "machines; if they are, try again in a minute: its caches may be outdated")
        manifest, problem = _manifest(path, data)
        keys: list[tuple[str, str]] = []
        if manifest is not None:
            problem, keys = _share(path, manifest)
        if not any_rank((bool(problem),), dist.group.WORLD, device)[0]:
            all_keys = [entry for text in gather_texts(json.dumps(keys), device) for entry in json.loads(text)]
            return _loaded(path, present(manifest, f"manifest of {path}", place="run"), header, all_keys)
        if problem:
            notes.append(f"{path}: {problem}")
            # all ranks read the same manifest, and each its share of the files
            if manifest is not None or dist.get_rank() == 0:
                print(f"warning: the checkpoint {path} is corrupted ({problem})"
                      + (f"; trying the previous one, {before}" if before else ""), file=sys.stderr, flush=True)
    if not notes:
        raise Failure([])  # another rank reports the error
    raise fail("RL0761", "all checkpoints are corrupted", place=str(resume), notes=tuple(notes),
               help="restore one from a backup, or start from the beginning without `--resume`")


def _steps_ahead(names: Iterable[str]) -> set[int]:
    """The later steps of which some tensors are. names: of the tensors in a checkpoint."""
    return {int(name.split("|")[1]) for name in names if name.startswith(f"{in_flight.PREFIX}|")}


def _bytes(file: Path) -> bytes:
    """The bytes of a file; empty if it cannot be read."""
    try:
        return file.read_bytes()
    except OSError:
        return b""


def drop_later(out: Path, checkpoint: LoadedCheckpoint) -> None:
    """Remove the checkpoints of later steps: the run repeats these steps, perhaps with other results."""
    if checkpoint.path.resolve().parent == (out / "checkpoints").resolve():
        for path in checkpoints(out):
            if step_of(path) > checkpoint.step:
                shutil.rmtree(path, ignore_errors=True)


def _manifest(path: Path, data: bytes) -> tuple[Manifest | None, str]:
    """The manifest of a checkpoint, or what is wrong with it."""
    try:
        manifest = read_manifest(data)
        name = path.name.removeprefix("step-")
        if name != path.name and name.isdecimal() and int(name) != manifest.step:
            raise ValueError(f"it is of step {manifest.step}")
    except ValueError as error:  # of JSON and of text that is not UTF-8, too
        return None, f"{MANIFEST}: {shown(str(error)[:300])}"
    return manifest, ""


def _share(path: Path, manifest: Manifest) -> tuple[str, list[tuple[str, str]]]:
    """What is wrong with this rank's share of the files; "" if nothing. And what they hold, as (file, key): so that a
    file is opened by one rank and by those that need what is in it, and not by all."""
    keys: list[tuple[str, str]] = []
    try:
        for name, (size, expected_digest) in list(manifest.files.items())[dist.get_rank() :: dist.get_world_size()]:
            file = path / Path(name).name
            if not file.is_file() or file.stat().st_size != size or digest(file) != expected_digest:
                return f"{shown(name)} has changed since it was written", []
            keys += [(file.name, key) for key in _keys(file)]
    except DAMAGE as error:
        return f"a file cannot be read: {shown(str(error)[:300])}", []
    return "", keys


def _keys(file: Path) -> list[str]:
    """The names of the tensors in a file. Each is named after its box, and must have its shape."""
    with safe_open(file, framework="pt") as opened:
        keys = list(opened.keys())
        for key in keys:
            box, tensor = _box(key.rpartition("|")[2]), opened.get_slice(key)
            if [b - a for a, b in box] != tensor.get_shape() or min(a for a, _ in box) < 0:
                raise ValueError(f"{file.name}: {key} has shape {tensor.get_shape()}")
            if tensor.get_dtype() not in _types(key):
                raise ValueError(f"{file.name}: {key} has the type {tensor.get_dtype()}")
    return keys


def _types(key: str) -> tuple[str, ...]:
    """The types that a tensor may have, by its name."""
    first, _, rest = key.partition("|")
    if first in (PREFIX, *RAGGED):
        return ROWS
    return CODES if is_quantized(rest.partition("|")[0]) else FLOATS


def _loaded(path: Path, manifest: Manifest, header: Mapping[str, Any], keys: Sequence[tuple[str, str]]
            ) -> LoadedCheckpoint:
    """The checkpoint, and what has changed in the program since. keys: (file, key) of all tensors."""
    try:
        changes = tuple(program_changes(manifest.program, json.loads(json.dumps(header))))
        return LoadedCheckpoint(path, manifest.step, manifest.states, manifest.data, manifest.readings,
                                manifest.models, _stored(path, keys), sum(manifest.timeouts.values()), changes)
    except DAMAGE as error:
        raise _damaged(path, str(error)) from None


def _damaged(path: Path, why: str) -> Failure:
    return fail("RL0761", "the checkpoint is corrupted", place=str(path), notes=(shown(why[:300]),),
                help="restore it from a backup, or start from the beginning without `--resume`")


def _stored(path: Path, keys: Sequence[tuple[str, str]]) -> Mapping[str, StoredBoxes]:
    stored: dict[str, StoredBoxes] = defaultdict(list)
    for name, key in keys:
        owner, _, text = key.rpartition("|")
        stored[owner].append((_box(text), path / name, key))
    return stored


@lru_cache(maxsize=4096)  # every rank reads the keys of all, of which most have the same few boxes
def _box(text: str) -> Box:
    return tuple((int(a), int(b)) for a, _, b in (part.partition(":") for part in text.split(",")))
