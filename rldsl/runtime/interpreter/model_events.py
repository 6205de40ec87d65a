"""Events on models: load, realloc, offload, onload, generate, infer. Training is in `train_event.py`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from rldsl.diag import internal_error
from rldsl.plan.events import Generate, Infer, Load, Offload, Onload, Realloc, split_buffer
from rldsl.plan.heads import TOP
from rldsl.plan.payloads import Conversation
from rldsl.plan.spaces import IndexedFrame
from rldsl.plan.turns import STOPPED
from rldsl.runtime.backend import ConversationOutput, PackedBatch, Prefix
from rldsl.runtime.comm.exchange import message_tag
from rldsl.runtime.comm.reshard import RankReshard, Tensors, reshard
from rldsl.runtime.comm.row_assignment import RowLengths
from rldsl.runtime.health.event_ring import EventRing
from rldsl.runtime.host_numbers import on_device
from rldsl.runtime.interpreter.carried import Parts, batch_of, interleaved, steps_ago, under_way
from rldsl.runtime.interpreter.conversations import Environments, RowTalk
from rldsl.runtime.persist.checkpoint_reader import LoadedCheckpoint
from rldsl.runtime.state.model_store import ModelStore
from rldsl.runtime.state.step import StepState, TalkTotals
from rldsl.runtime.state.turns import marked
from rldsl.runtime.store import Pending, RaggedRows, offsets_within, ragged_indices
from rldsl.sharding.dtypes import in_wire_dtypes
from rldsl.sharding.micro_batches import micro_batches, num_micro_batches
from rldsl.sharding.partition import mix

DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load(models: ModelStore, resumed: LoadedCheckpoint | None, event: Load) -> None:
    """Fill a shard from the model's directory, or from the checkpoint that the run resumes from; or let it use the
    parameters of another layout."""
    key, context = (event.model, event.layout), models.context
    if event.alias_of:  # has been filled already, from the checkpoint if there is one
        models.shard(*key).alias(models.shard_to_read(event.model, event.alias_of))
        return
    if resumed is None or not resumed.has(event.model):
        models.shard(*key, load=True)
        return
    model, layout = context.models[event.model], context.world.layouts[event.layout]
    resumed.fill(model, layout, context.world.meshes[layout.mesh], context.rank, models.shard(*key))


def realloc(models: ModelStore, ring: EventRing, event: Realloc) -> None:
    """Reshard a model ("realloc" in the plan). The first call that uses the new copy, or changes the old one, waits for
    the last rounds. Earlier communication into either copy is finished first. A rank that only sends waits here,
    unless it has a separate stream for that (`SideStream`)."""
    context = models.context
    model, source, world = context.models[event.model], context.models[event.source or event.model], context.world
    src, dst = world.layouts[event.src], world.layouts[event.dst]
    src_mesh, dst_mesh = world.meshes[src.mesh], world.meshes[dst.mesh]
    parts = in_wire_dtypes(source, src.id, model, dst.id, event.decay)
    if event.id not in models.reshards:
        models.reshards[event.id] = tuple(RankReshard.plan(part, src, src_mesh, dst, dst_mesh,
                                                           context.plan.header.devices_per_node, world.rank)
                                          for part in parts)
    have: Tensors | None = None
    want: Tensors | None = None
    if world.rank in src_mesh.members():
        models.shard(source.name, src.id)
        have = models.shard_to_read(source.name, src.id).state_dict()
    if world.rank in dst_mesh.members():
        models.shard(model.name, dst.id)
        want = models.shard_to_write(model.name, dst.id).state_dict()
    dtypes = [DTYPE[part.dtype] for part in parts]
    issued = [reshard(todo, have, want, dtype, models.side, message_tag(event), event.decay)
              for todo, dtype in zip(models.reshards[event.id], dtypes, strict=True)]
    pending = Pending(ring.wait_tracker(lambda: [each.finish() for each in issued]), sum(each.bytes for each in issued))
    on_stream = models.side.stream is not None
    if want is not None:
        models.arriving[model.name, dst.id] = pending
    elif not on_stream:
        pending.finish()
        return
    # other dtypes are sent from a copy, which a host has made by now and a stream has not
    if have is not None and (on_stream or any(t.dtype in dtypes for t in have.values())):
        models.leaving.setdefault(models.owner(source.name, src.id), {})[event.id] = pending


def offload(models: ModelStore, event: Offload) -> None:
    models.shard_to_write(event.model, event.layout).offload(event.part)


def onload(models: ModelStore, event: Onload) -> None:
    """Issued here; whoever uses the shard waits for it. Parameters that are still arriving are complete before they
    move; the optimizer's part follows them, and nothing waits between the two."""
    key = (event.model, event.layout)
    if event.part == "parameters":
        models.shard_to_read(*key)
    before, finish = models.arriving.pop(key, None), models.shards[key].onload(event.part)
    models.arriving[key] = Pending(finish if before is None else lambda: (before.finish(), finish()))


def generate(models: ModelStore, step: StepState, event: Generate) -> None:
    context = step.context
    spread, record = context.spreads[event.spread], context.frames[event.frame]
    rows = step.my_rows(spread, event.frame)
    prompt_rows = rows // record.per_prompt
    lens = step.rows.lens[event.prompts].of("tokens")[prompt_rows]  # of a continuation, the whole text so far
    tokens = step.read(event.reads, f"{event.prompts}.tokens")
    prompts = PackedBatch(rows + step.first_row(record.count), lens, torch.zeros_like(lens),
                          _repeated(tokens, prompt_rows))
    shard = models.shard_to_read(event.model, event.layout)
    seed = step.sampling_seed(event.id, event.frame)
    prefix = None
    if event.cache_of:  # the sequence of each row, as the call that made it counted its rows
        made = step.my_rows(spread, event.cache_of)
        begins = rows // (record.count // context.frames[event.cache_of].count)
        prefix = Prefix(step.read(event.reads, f"{event.cache_of}.cache"), torch.searchsorted(made, begins))
    cache = f"{event.frame}.cache@{spread.id}"
    generated = shard.generate(prompts, event.sampling, seed=seed, step=step.index,
                               max_num_seqs=event.mbs, max_prompt_len=record.max_prompt_tokens,
                               continues=context.frames[event.prompts].max_response_tokens > 0,
                               keep_cache=cache in event.writes, prefix=prefix)
    if cache in event.writes:
        step.buffers.put(cache, generated.cache)
    all_lens = RowLengths(*(torch.zeros(record.count, dtype=torch.int64, device=context.device) for _ in range(2)))
    all_lens.prompt[rows], all_lens.response[rows] = lens, generated.batch.response_lens
    step.rows.lens[event.frame] = all_lens  # 0 for other ranks' rows, until the lengths are exchanged
    for name, data in (("tokens", generated.batch.tokens), ("logprobs", generated.logprobs),
                       ("finished", generated.finished)):
        step.write(f"{event.frame}.{name}", spread.id, rows, data)


def converse(models: ModelStore, step: StepState, environments: Environments, event: Generate) -> None:
    """A generate event with an environment."""
    context, limits = step.context, event.conversation
    if limits is None:
        raise internal_error(f"{event.display_name} has no environment", "run")
    frame = context.frames[event.frame]
    rows = _conversations(step, event, frame)
    first = step.first_row(frame.count // limits.branches)
    seed = step.sampling_seed(event.id, event.frame)
    columns = next(step.buffers.get(b) for b in event.reads if split_buffer(b)[0].endswith(".columns"))
    per_row = frame.count // limits.branches // frame.chain[-1].count
    data = context.data[frame.data]
    talk = None
    if context.world.axes(context.world.layouts[event.layout]).talks:
        talk = RowTalk(environments, event.id,
                       {row + first: columns[row // per_row] for row in rows.tolist()},
                       dict(data.columns)["prompt"], mix(seed, step.index), event.at)
    made = models.shard_to_read(event.model, event.layout).converse(
        rows + first, event.sampling, limits, talk, seed=seed, step=step.index, max_num_seqs=event.mbs,
        waiting=event.waiting)
    failed = int(_failed(made)[_of_conversations(made, limits)].sum())
    if talk is not None and failed == len(rows) > 0:
        print(f"warning: step {step.number}: all {failed} conversations of {event.display_name} on rank {context.rank} "
              "ended by an error or a time limit of their environment (on_error=end)", file=sys.stderr, flush=True)
    _write(step, event, limits, len(rows), made)


def _conversations(step: StepState, event: Generate, frame: IndexedFrame) -> torch.Tensor:
    """The numbers of the conversations of this rank, ascending: of rows, if each has one."""
    spread = step.context.spreads[event.spread]
    if event.conversation is None or event.conversation.branches == 1:
        return step.my_rows(spread, event.frame)
    prompts, each = step.my_rows(spread, event.prompts), frame.per_prompt // event.conversation.branches
    return (prompts[:, None] * each + torch.arange(each, device=prompts.device)).flatten()


def _of_conversations(made: ConversationOutput, limits: Conversation) -> torch.Tensor:
    """[S] bool: the first branch of each conversation. Each has one."""
    return made.batch.rows % limits.branches == 0


def _failed(made: ConversationOutput) -> torch.Tensor:
    """[S] bool: conversations that their environments ended by an error or by being late."""
    return made.stopped >= min(STOPPED["timeout"], STOPPED["error"])


def _write(step: StepState, event: Generate, limits: Conversation, num_conversations: int,
           made: ConversationOutput) -> None:
    context, batch = step.context, made.batch
    if batch.own is None:
        raise internal_error("conversations without turns", "generate")
    count = context.frames[event.frame].count
    rows, once = batch.rows - step.first_row(count), _of_conversations(made, limits)
    failed = int(_failed(made)[once].sum())
    step.talked.append(TalkTotals(num_conversations, int(made.turns.sum()), failed, made.waited, made.lasted,
                                  made.given_away))
    branches = torch.bincount(once.cumsum(0) - 1)[once.cumsum(0) - 1]
    lens = RowLengths(*(torch.zeros(count, dtype=torch.int64, device=context.device) for _ in range(2)))
    lens.prompt[rows], lens.response[rows] = batch.prompt_lens, batch.response_lens
    step.rows.set_lengths(event.frame, lens)  # 0 for other ranks' rows, until the lengths are exchanged
    for name, data in (("tokens", marked(batch.tokens, batch.own)), ("logprobs", made.logprobs),
                       ("finished", made.stopped == 0), ("reward", made.rewards), ("turns", made.turns.float()),
                       ("stopped", made.stopped.float()), ("branch", (rows % limits.branches).float()),
                       ("branches", branches.float()), ("turn_sizes", made.turn_sizes.reshape(-1)),
                       ("turn_reward", made.turn_rewards.reshape(-1))):
        step.write(f"{event.frame}.{name}", event.spread, rows, data)


def generate_a_part(models: ModelStore, step: StepState, event: Generate) -> None:
    """A generate event with `per_step`: the next part of each response that has not ended, and new responses. Writes
    all that are under way, and which prompts have only responses that ended; the rest stays for the next step."""
    frame = step.context.frames[event.frame]
    prompt_rows = step.my_rows(step.context.spreads[event.spread], event.prompts)
    prompts = step.read(event.reads, f"{event.prompts}.tokens").gather(prompt_rows)
    parts = under_way(step, event.frame, frame, prompt_rows)
    shard, seed = models.shard_to_read(event.model, event.layout), step.sampling_seed(event.id, event.draws_as)
    most = event.sampling.max_new_tokens
    begun, last = parts.incomplete(most), most - (frame.iterations - 1) * event.per_step
    allowed = torch.where(steps_ago(parts.rows, frame) == frame.iterations - 1, last, event.per_step)
    for new in dict.fromkeys((event.per_step, last)):  # every rank makes the same calls
        chosen = begun & (allowed == new)
        batch = batch_of(step, frame, prompts, parts, chosen, seed)
        made = shard.generate(batch, replace(event.sampling, max_new_tokens=new), seed=seed, step=step.index,
                              max_num_seqs=event.mbs, max_prompt_len=frame.max_prompt_tokens + most - new,
                              max_prompts=len(prompt_rows) * frame.per_prompt)
        parts = parts.with_more(chosen, made)
    waits, step.carried[event.frame] = parts.left_for(step.number, frame, most)
    _write_parts(step, event, frame, prompts, parts, ~waits)


def _write_parts(step: StepState, event: Generate, frame: IndexedFrame, prompts: RaggedRows, parts: Parts,
                 ended: torch.Tensor) -> None:
    """The values of the step. ended: [S] bool, of all responses of a prompt."""
    rows, device = parts.rows, parts.rows.device
    behind = prompts.gather(rows // frame.per_prompt)
    lens = RowLengths(*(torch.zeros(frame.count, dtype=torch.int64, device=device) for _ in range(2)))
    lens.prompt[rows], lens.response[rows] = behind.sizes, parts.sizes
    step.rows.set_lengths(event.frame, lens)  # 0 for other ranks' rows, until the lengths are exchanged
    ages = steps_ago(rows, frame).repeat_interleave(parts.sizes)
    behind_by = event.ahead + ages - offsets_within(parts.sizes) // event.per_step
    for name, data in (("tokens", interleaved(behind, parts.tokens)), ("logprobs", parts.logprobs.data),
                       ("finished", parts.finished), ("ended", ended), ("version", behind_by.float())):
        step.write(f"{event.frame}.{name}", event.spread, rows, data)


def _repeated(tokens: RaggedRows, prompts: torch.Tensor) -> torch.Tensor:
    """The tokens of each of `prompts` (ascending prompt numbers, with repetitions)."""
    at = torch.searchsorted(tokens.ids, prompts)
    starts = tokens.sizes.cumsum(0) - tokens.sizes
    return tokens.data[ragged_indices(starts, at, tokens.sizes[at])]


def infer(models: ModelStore, step: StepState, event: Infer) -> None:
    context = step.context
    spread, layout = context.spreads[event.spread], context.world.layouts[event.layout]
    rows = step.my_row_numbers(spread, event.frame)
    totals = step.rows.lens[event.frame].to_list("tokens")
    tokens = step.read(event.reads, f"{event.frame}.tokens")
    bounds = event.mbs, layout.pp, event.mbt
    divided = list(micro_batches(rows, totals, *bounds, step.siblings((event.frame,), event.model, layout)))
    if layout.ep > 1:  # ranks that share experts make the same number of forward passes
        count = max(num_micro_batches(rows[event.frame], totals, *bounds) for rows in step.rows.rows_by_dp(spread))
        divided += [()] * (count - len(divided))
    parts = [on_device(p, context.device) for p in divided]
    batches = [step.packed(event.frame, tokens, part, numbers) for part, numbers in zip(parts, divided, strict=True)]
    shard = models.shard_to_read(event.model, event.layout)
    if event.output_name == TOP:
        ids, logprobs = shard.top(batches, context.values[event.ids].width, event.temperature, event.words)
        results = {event.ids: ids.flatten(), event.value: logprobs.flatten()}
    else:
        if event.ids:
            batches = [replace(batch, ids=step.ids_of_tokens(event.reads, event.ids, part))
                       for batch, part in zip(batches, parts, strict=True)]
        results = {event.value: shard.infer(batches, event.output_name, event.temperature)}
    order = torch.cat(parts) if parts else on_device(rows, context.device)
    for value, result in results.items():
        record = context.values[value]
        sizes = step.rows.sizes(record, order)
        by_part = _by_micro_batch(parts, sizes, [sum(step.rows.amounts(record, p)) for p in divided], result)
        joined = RaggedRows.join(by_part) if by_part else RaggedRows(order, sizes, result)
        step.write(value, spread.id, joined.ids, joined.data)


def _by_micro_batch(parts: Sequence[torch.Tensor], sizes: torch.Tensor, amounts: Sequence[int], data: torch.Tensor
                    ) -> list[RaggedRows]:
    """The results of each micro-batch. parts: the rows of each. sizes: entries of each row, in the order of `parts`.
    amounts: of each micro-batch. data: the entries of all rows, in that order."""
    by_part = sizes.split([len(p) for p in parts])
    return [RaggedRows(*x) for x in zip(parts, by_part, data.split(amounts), strict=True)]
