"""Completions by one shard: packed prefill, a static KV cache, continuous batching.

Every rank of the shard runs the same batches in the same order: the last pipeline stage samples, and the tokens go to
all stages. Neighboring sequences with the same prompt share its prefill.
Invariant: what is sampled for a row depends only on (seed, step, row, position in its response) and the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rldsl.backends.torch.generate.captured_step import CaptureSwitch
from rldsl.backends.torch.generate.clock_ticks import run_to_completion
from rldsl.backends.torch.generate.decode_state import DecodeState, DecodeStates, Responses, keep_released
from rldsl.backends.torch.generate.engine import Engine
from rldsl.backends.torch.generate.kept_cache import CacheKeeper, KeptCache
from rldsl.backends.torch.generate.sampling import Sampler, prepare_kernels
from rldsl.backends.torch.generate.scheduler import Scheduler
from rldsl.backends.torch.generate.stop_conditions import StopStrings, tokenizer_of
from rldsl.backends.torch.kernels.attention_kernels import prepare_decode_kernel
from rldsl.diag import fail
from rldsl.memory.decode_shapes import round_to_bucket
from rldsl.plan.events import Sampling
from rldsl.runtime.backend import Axes, GenerationOutput, PackedBatch, Prefix
from rldsl.runtime.store import offsets_within

if TYPE_CHECKING:
    from rldsl.backends.torch.model.stage import Stage

POLL_EVERY = {"cuda": 8}  # decode steps between polls for finished sequences, where a poll stalls the device


@torch.no_grad()
def generate(stage: Stage, axes: Axes, prompts: PackedBatch, sampling: Sampling, *, tokenizer_dir: str, seed: int,
             step: int, max_num_seqs: int, max_prompt_len: int = 0, max_prompts: int = 0, continues: bool = False,
             poll_every: int = 0, capture: CaptureSwitch | None = None, states: DecodeStates | None = None,
             keep_cache: bool = False, prefix: Prefix | None = None) -> GenerationOutput:
    """See `Shard.generate`. These three arguments change no number:

    poll_every: decode steps between polls for finished sequences (0: the device's default).
    capture: whether decode steps are captured and replayed; switched off where a capture fails (None: they are).
    states: where captured steps are kept for later calls, which is valid while parameters stay where they are.
    Errors: RL0732 for an empty prompt."""
    count, device = len(prompts), prompts.tokens.device
    sampled, prompts = prompts.response_lens, _as_prompts(prompts)
    if count and int(prompts.prompt_lens.min()) == 0:
        raise fail("RL0732", "a sequence has an empty prompt", help="every prompt needs at least one token")
    if not count and axes.ep.size == 1:
        nothing = CacheKeeper(0).kept(device) if keep_cache else None
        return _output(prompts, Responses.empty(0, sampling.max_new_tokens, device), nothing)
    tokenizer, eos_ids = tokenizer_of(tokenizer_dir)
    if continues:
        last = prompts.tokens[prompts.prompt_lens.cumsum(0) - 1]
        incomplete = ~torch.isin(last, torch.tensor(eos_ids, device=device))
        generated = generate(stage, axes, _some(prompts, incomplete), sampling, tokenizer_dir=tokenizer_dir, seed=seed,
                             step=step, max_num_seqs=max_num_seqs, max_prompt_len=max_prompt_len,
                             poll_every=poll_every, capture=capture, states=states, keep_cache=keep_cache,
                             prefix=None if prefix is None else prefix._replace(sequences=prefix.sequences[incomplete]))
        return _with_complete(prompts, incomplete, generated)
    stop_strings = StopStrings(sampling.stop, tokenizer) if sampling.stop else None
    waits_anyway = axes.ep.size > 1 or stop_strings is not None  # the host reads from the device in every step
    room = max(min(round_to_bucket(count), max_prompts), count)  # calls of nearly as many share captured steps
    scheduler = Scheduler(
        prompts.prompt_lens.tolist(), shares_prompt(prompts), min(max_num_seqs or room, room), axes.pp.size,
        sampling.max_new_tokens, 1 if waits_anyway else poll_every or POLL_EVERY.get(device.type, 1), max_prompt_len,
        prefix is not None, device.type == "cpu" and not stage.invariant, stage.is_recurrent)
    prepare_decode_kernel(device, stage.matmul_dtype)
    prepare_kernels(sampling, device)
    key = (room, scheduler.num_slots, sampling, tuple(eos_ids))
    state = None if states is None else states.pop(key, None)
    if state is None or state.cache.width < scheduler.kv_width:
        state = DecodeState.allocate(
            room, scheduler.num_slots, scheduler.kv_width, sampling.max_new_tokens, eos_ids,
            draws=stage.last and not sampling.greedy, num_groups=axes.pp.size,
            capture=(capture or CaptureSwitch()) if _may_capture(axes, device) else CaptureSwitch(False),
            tp=axes.tp, device=device)
    state.allocate_memory()
    if stop_strings is not None and bool(sampled.any()):
        stop_strings = stop_strings.after(prompts, sampled)
    sampler = Sampler(stage, sampling, seed, step, state.eos_ids) if stage.last else None
    engine = Engine(stage, prompts, sampler, stop_strings, sampling.min_new_tokens, sampling.max_new_tokens, scheduler,
                    state, sampled, CacheKeeper(count) if keep_cache else None, prefix)
    run_to_completion(engine, axes)
    kept = None if engine.keeper is None else engine.keeper.kept(device)
    output = _output(prompts, state.responses.first(count), kept, engine.num_prefilled)
    if states is not None:
        keep_released(states, key, state)
    return output


def _may_capture(axes: Axes, device: torch.device) -> bool:
    """Whether decode steps may be captured. Traces hold collectives of tp, and experts as opaque calls, which
    communicate over ep once in each step, on ranks that replay it as on others. CUDA graphs hold no call that reads on
    the host, as expert parallelism does to know how many rows each rank gets; graphs with collectives of NCCL were
    never tried."""
    return device.type == "cpu" or axes.ep.size == axes.tp.size == 1


def _as_prompts(batch: PackedBatch) -> PackedBatch:
    """Sequences as prompts, with what was sampled of their responses."""
    lens = batch.prompt_lens + batch.response_lens
    return PackedBatch(batch.rows, lens, torch.zeros_like(lens), batch.tokens)


def _some(batch: PackedBatch, chosen: torch.Tensor) -> PackedBatch:
    """Some of the prompts of a batch. chosen: [S] bool."""
    tokens = batch.tokens[chosen.repeat_interleave(batch.prompt_lens)]
    return PackedBatch(batch.rows[chosen], batch.prompt_lens[chosen], batch.response_lens[chosen], tokens)


def _with_complete(prompts: PackedBatch, incomplete: torch.Tensor, generated: GenerationOutput) -> GenerationOutput:
    """`generated` for those of `prompts` that are `incomplete` ([S] bool); the others get empty, finished responses."""
    responses = torch.zeros_like(prompts.prompt_lens)
    responses[incomplete] = generated.batch.response_lens
    finished = torch.ones_like(incomplete)
    finished[incomplete] = generated.finished
    lens = prompts.prompt_lens + responses
    tokens = prompts.tokens.new_empty(int(lens.sum()))
    of_prompt = offsets_within(lens) < prompts.prompt_lens.repeat_interleave(lens)
    tokens[of_prompt] = prompts.tokens
    made = generated.batch
    of_response = offsets_within(made.prompt_lens + made.response_lens) >= made.prompt_lens.repeat_interleave(
        made.prompt_lens + made.response_lens)
    tokens[~of_prompt] = made.tokens[of_response]
    kept: KeptCache | None = generated.cache
    return GenerationOutput(PackedBatch(prompts.rows, prompts.prompt_lens, responses, tokens), generated.logprobs,
                            finished, None if kept is None else kept.spread_out(incomplete), generated.num_prefilled)


def shares_prompt(prompts: PackedBatch) -> list[bool]:
    """For each sequence, whether it has the prompt of the one before it."""
    lens = prompts.prompt_lens
    sequence = torch.arange(len(lens), device=lens.device).repeat_interleave(lens)
    before = torch.arange(len(sequence), device=lens.device) - lens[sequence]  # the same place one prompt earlier
    differs = (prompts.tokens != prompts.tokens[before.clamp(min=0)]).long()
    same = torch.zeros_like(lens).index_add_(0, sequence, differs) == 0
    same[1:] &= lens[1:] == lens[:-1]
    same[:1] = False
    result: list[bool] = same.tolist()
    return result


def _output(prompts: PackedBatch, responses: Responses, kept: KeptCache | None = None, num_prefilled: int = 0
            ) -> GenerationOutput:
    """Each prompt followed by its response, and the log-probs of the responses. Everything is copied, since the memory
    of the decode state is given back."""
    lens = prompts.prompt_lens + responses.lengths
    starts = lens.cumsum(0) - lens
    tokens = torch.empty(int(lens.sum()), dtype=torch.long, device=lens.device)
    tokens[starts.repeat_interleave(prompts.prompt_lens) + offsets_within(prompts.prompt_lens)] = prompts.tokens
    sampled = torch.arange(responses.tokens.shape[1], device=lens.device) < responses.lengths[:, None]
    response_starts = (starts + prompts.prompt_lens).repeat_interleave(responses.lengths)
    tokens[response_starts + offsets_within(responses.lengths)] = responses.tokens[sampled]
    batch = PackedBatch(prompts.rows, prompts.prompt_lens, responses.lengths.clone(), tokens)
    return GenerationOutput(batch, responses.logprobs[sampled], responses.finished.clone(), kept, num_prefilled)
