"""A model as a HuggingFace directory, without one rank ever holding all of it; adapters as PEFT's.

Each parameter becomes complete on one owner, and each owner writes its own safetensors file. Everything is written into
a sibling directory that takes the final name at the end, when all of it is on the disk: a crash, of the machine too,
never leaves a damaged checkpoint under that name. A crash between the two renames that replace a checkpoint leaves the
earlier one whole as `.NAME.old`; the next save to that name begins by giving it its name back. Errors: RL0706 the
directory cannot be written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rldsl.diag import Diagnostic
from rldsl.plan.adapter_names import CONFIG, WEIGHTS, config, stored_name
from rldsl.plan.events import Save
from rldsl.plan.model import Model
from rldsl.plan.processor_files import PROCESSORS
from rldsl.reshard.gather import gather, owners
from rldsl.reshard.in_place import pieces_by_parameter
from rldsl.reshard.rounds import Message
from rldsl.runtime.comm.agreement import raise_together
from rldsl.runtime.comm.exchange import message_tag, post
from rldsl.runtime.comm.reshard import Tensors, local_box
from rldsl.runtime.files import sync
from rldsl.runtime.persist.allowed_paths import MARK, check_writes, is_foreign
from rldsl.runtime.state.context import RunContext
from rldsl.runtime.state.model_store import ModelStore
from rldsl.sharding.boxes import Box, cell_of, local_slice, parameters, slices, volume
from rldsl.sharding.dtypes import parameter_dtype, storage_dtype
from rldsl.sharding.stored_tensors import divided_names, is_divided, of_experts, stored_tensors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def save(models: ModelStore, step: int, event: Save) -> None:
    """Write the models of a save event. step: the number of the current step."""
    context = models.context
    model, layout = context.models[event.model], context.world.layouts[event.layout]
    mesh, group = context.world.meshes[layout.mesh], context.world.group(event.mesh)
    shard = models.shard_to_read(event.model, event.layout)
    members = mesh.members()
    # adapters are small, and PEFT reads them from one file
    chosen = dict.fromkeys(owners(model, layout, mesh), members[0]) if model.lora else owners(model, layout, mesh)
    tensors = _gather(context, event, model, shard.state_dict(), chosen)
    writers = sorted(set(chosen.values()))
    names = {rank: WEIGHTS if model.lora else _file(i, len(writers)) for i, rank in enumerate(writers)}
    index = {name: names[rank] for name, rank in chosen.items()}
    if model.lora:
        tensors = {stored_name(name): tensor for name, tensor in tensors.items()}
    else:
        tensors, index = _as_stored(model, tensors, index)
    if "{step}" in event.path:  # another place than the one looked at before
        check_writes(context.plan, context.out, context.allow_write, event.path, step)
    final = Path(event.path.replace("{out}", str(context.out)).replace("{step}", str(step)))
    partial = final.parent / f".{final.name}.partial"
    first = context.rank == members[0]

    _together(group, context, lambda: _fresh(partial, final) if first else None, final)
    _together(group, context, lambda: _write(partial / names[context.rank], tensors) if tensors else None, final)
    header = context.plan.header
    dtype = storage_dtype(model, layout.id)
    mark = {"program": header.program, "flow": header.flow, "model": model.name, "step": step}
    _together(group, context,
              lambda: _finish(partial, final, model, shard.export(), index, mark, dtype) if first else None, final)


def _file(i: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"


def _gather(context: RunContext, event: Save, model: Model, local_tensors: Tensors,
            chosen: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """The parameters that this rank is chosen to write, complete, on the CPU."""
    layout = context.world.layouts[event.layout]
    mesh, rank = context.world.meshes[layout.mesh], context.rank
    sends, receives = gather(model, layout, mesh, chosen, rank)
    held = pieces_by_parameter(model, layout, cell_of(layout, mesh, rank))
    dtypes = {p.name: DTYPES[parameter_dtype(p.spec, storage_dtype(model, layout.id))] for p in parameters(model)}
    complete = {p.name: torch.empty(p.spec.shape, dtype=dtypes[p.name], device=context.device)
                for p in parameters(model) if chosen[p.name] == rank}
    for name, target in complete.items():
        parameter, pieces = held[name]
        for piece in pieces:
            target[slices(piece.box)] = local_tensors[name][local_slice(piece, piece.box, parameter.dim)]
    # one message to each rank, in which boxes of the widest dtype come first, so that each is aligned
    into = {m.peer: torch.empty(_num_bytes(m, dtypes), dtype=torch.uint8, device=context.device) for m in receives}
    out = {m.peer: torch.cat([_bytes(local_tensors[name][at]) for name, at in
                              (local_box(held, *box) for box in _widest_first(m, dtypes))]) for m in sends}
    post(out, into, message_tag(event)).wait()
    for message in receives:
        at = 0
        for name, box in _widest_first(message, dtypes):
            target = complete[name][slices(box)]
            stop = at + target.numel() * target.itemsize
            target.copy_(into[message.peer][at:stop].view(target.dtype).view(target.shape))
            at = stop
    return {name: t.cpu() for name, t in complete.items()}


def _as_stored(model: Model, tensors: Mapping[str, torch.Tensor], index: Mapping[str, str]
               ) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors, and the file of every tensor, as the model's directory has them: of one expert each, where it does, and
    matrices divided where it divides them."""
    stored, files, rows = dict(tensors), dict(index), _divided_rows(model)
    for p in parameters(model):
        parts = [*stored_tensors(p, rows)]
        file, tensor = (files.pop(p.name), stored.pop(p.name, None)) if parts else ("", None)
        for name, box in parts:
            files[name] = file
            if tensor is not None:
                stored[name] = tensor[slices(box)][0] if of_experts(p) else tensor[slices(box)].contiguous()
    return stored, files


def _divided_rows(model: Model) -> dict[str, int]:
    """Rows of the tensors that the model's directory divides matrices into; {} where it divides none."""
    from safetensors import safe_open

    names = {name for p in parameters(model) if is_divided(p) for name in divided_names(p)}
    found: dict[str, int] = {}
    for path in sorted(Path(model.path).glob("*.safetensors")) if names else ():
        with safe_open(path, "pt") as file:
            found |= {name: file.get_slice(name).get_shape()[0] for name in names & {*file.keys()}}
    return found


def _widest_first(message: Message, dtypes: Mapping[str, torch.dtype]) -> list[tuple[str, Box]]:
    return sorted(message.boxes, key=lambda x: -dtypes[x[0]].itemsize)


def _num_bytes(message: Message, dtypes: Mapping[str, torch.dtype]) -> int:
    return sum(volume(box) * dtypes[name].itemsize for name, box in message.boxes)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1).view(torch.uint8)


def _together(group: Any, context: RunContext, work: Any, final: Path) -> None:
    """Run `work` on this rank. If it fails on any rank, every rank stops, and the one that failed reports why."""
    diagnostics: tuple[Diagnostic, ...] = ()
    try:
        work()
    except OSError as error:
        why = f"the checkpoint cannot be written: {error.strerror or error}"
        diagnostics = (Diagnostic("RL0706", why, place=str(final),
                           help="check the path, its permissions and the free disk space; earlier checkpoints are "
                                "intact"),)
    raise_together(diagnostics, group, context.device)


def _aside(final: Path) -> Path:
    return final.parent / f".{final.name}.old"


def _fresh(partial: Path, final: Path) -> None:
    """An empty directory to write to. Also restores the checkpoint, if a run ended between the two renames."""
    if _aside(final).exists() and not final.exists():
        os.replace(_aside(final), final)
    if is_foreign(final):  # it was not there before the first step
        raise FileExistsError(17, "the directory exists and was not written by a save")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _write(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    try:
        save_file({name: t.contiguous() for name, t in tensors.items()}, str(file), metadata={"format": "pt"})
    except Exception as error:  # the library's own error type covers a full disk and a missing directory
        raise OSError(str(error)) from error
    sync(file)


def _finish(partial: Path, final: Path, model: Model, export: Mapping[str, Any], index: Mapping[str, str],
            mark: Mapping[str, Any], dtype: str = "float32") -> None:
    """Index, config, tokenizer and whose directory it is; then the final name. dtype: of what has been written."""
    if len(set(index.values())) > 1:
        total = sum((partial / name).stat().st_size for name in set(index.values()))
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}, indent=2)
        (partial / "model.safetensors.index.json").write_text(text + "\n")
    if model.lora:
        (partial / CONFIG).write_text(json.dumps(config(model), indent=2) + "\n")
    else:
        _config(export["config"], model, dtype).save_pretrained(partial)
    kept = ("token", "vocab", "merges", "special", "added", "generation_config", "chat_template", *PROCESSORS,
            "video_preprocessor")
    for file in Path(export["tokenizer"]).iterdir():
        if file.is_file() and file.name.startswith(kept):
            shutil.copyfile(file, partial / file.name)
    (partial / MARK).write_text(json.dumps(mark, indent=1) + "\n")
    for file in partial.iterdir():  # weights have been synced by their writers, and cost nothing now
        sync(file)
    sync(partial)
    if final.exists():
        aside = _aside(final)  # POSIX cannot exchange two directories: until the second rename this is the checkpoint
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(final, aside)
        os.replace(partial, final)
        sync(final.parent)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        os.replace(partial, final)
        sync(final.parent)


def _config(config: Any, model: Model, dtype: str) -> Any:
    """The config that loads what we wrote: a value model is a sequence classifier with one label, and nothing is packed
    any more. dtype: that of the parameters, whatever the calls computed in."""
    import copy

    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSIFIERS

    config = copy.deepcopy(config)
    config.dtype = getattr(torch, dtype)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if not model.head.vocabulary:
        config.num_labels = 1
        if config.model_type in CLASSIFIERS:  # there are few of models that read images
            config.architectures = [CLASSIFIERS[config.model_type]]
    return config
