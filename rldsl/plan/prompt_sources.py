"""Which rows of a plan's frames surely have the same prompt.

In: a plan. Out: for each frame the frame whose sequences its prompts are, and how many consecutive rows have one of
them. It follows from how frames are made, so that every rank knows it without reading a token. Frames of which it is
not sure are left out: those that Python writes, cut from responses, drawn from buffers or concatenated, and
conversations. Besides, whether a call makes use of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import gcd

from rldsl.plan.events import ModelCall
from rldsl.plan.model import Layout, Model, Plan, Spread
from rldsl.plan.payloads import CollectSpec, DeriveSpec, FetchSpec, GenerateSpec, InferSpec, TrainSpec
from rldsl.plan.projection import event_paths
from rldsl.plan.spaces import IndexedFrame, indexed_frames

# Sharing has to save one of this many tokens of a micro-batch: to gather keys and values of prompts,
# and to add their gradients, takes about 2 % of a pass on a CPU
MIN_SAVED = 32


@dataclass(frozen=True, slots=True)
class PromptSource:
    """The prompt of row r is sequence r // `run` of `frame`, or its first tokens. So rows with the same number, also of
    other frames with the same source, have the same prompt if their prompts are equally long."""

    frame: str  # id; of what a loop collects its own
    run: int    # rows


def prompt_sources(plan: Plan) -> dict[str, PromptSource]:
    """Frame -> where its prompts come from, of frames of which it is sure."""
    return sources_of((event for event, _ in event_paths(plan)), indexed_frames(plan))


def sources_of(events: Iterable[object], frames: Mapping[str, IndexedFrame]) -> dict[str, PromptSource]:
    """As `prompt_sources`. events: of a plan, or the nodes of a graph, in order, those of blocks included."""
    found: dict[str, PromptSource] = {}
    selected: dict[str, str] = {}  # frame -> the one whose sequences it has, under the same numbers

    def lies_in(frame: str, prompts: str) -> PromptSource:
        return PromptSource(selected.get(prompts, prompts), max(frames[frame].count // frames[prompts].count, 1))

    for event in events:
        if isinstance(event, FetchSpec):
            found |= {f: lies_in(f, event.frames[0]) for f in event.frames}
        elif isinstance(event, GenerateSpec) and event.conversation is None:
            found[event.frame] = lies_in(event.frame, event.prompts)
        elif isinstance(event, CollectSpec) and event.frame in found:
            found[event.into] = PromptSource(event.into, found[event.frame].run)
        elif isinstance(event, DeriveSpec):
            if event.op == "where":
                selected[event.frame] = selected.get(event.source, event.source)
            source = lies_in(event.frame, event.parts[0]) if event.op == "reprompt" else \
                _of_derived(event, frames, found.get(event.source))
            found |= {event.frame: source} if source else {}
    return found


def _of_derived(event: DeriveSpec, frames: Mapping[str, IndexedFrame], source: PromptSource | None
                ) -> PromptSource | None:
    """source: of the frame that it is made from."""
    if source is None or event.op in ("where", "whole"):  # the same prompts, or beginnings of them
        return source
    each = frames[event.source].per_prompt
    if event.op == "pick" and source.run % each == 0:  # its row p is one of the rows p * each, p * each + 1, ...
        return PromptSource(source.frame, source.run // each)
    return None


def shares_prompts(model: Model, layout: Layout) -> bool:
    """Whether calls that need no KV cache compute the prompt of several sequences in a micro-batch once. Not where each
    sequence is divided over ranks, where sums have one order, and where modules need complete sequences."""
    return layout.cp == 1 and not model.invariant and not model.sizes.whole_sequences


def prompts_by_spread(plan: Plan) -> dict[str, int]:
    """Spread -> how many consecutive rows surely have one prompt, of spreads that divide rows by tokens for calls that
    compute it once for the rows of a rank."""
    sources, models = prompt_sources(plan), {m.name: m for m in plan.models}
    layouts, spreads = {x.id: x for x in plan.layouts}, {s.id: s for s in plan.spreads}
    runs: dict[str, int] = {}
    for event, _ in event_paths(plan):
        if isinstance(event, ModelCall) and isinstance(event, InferSpec | TrainSpec):
            frames = event.frames if isinstance(event, TrainSpec) else (event.frame,)
            known = [sources[f].run if f in sources else 1 for f in frames]
            run = gcd(*known) if shares_prompts(models[event.model], layouts[event.layout]) else 1
            runs[event.spread] = gcd(runs.get(event.spread, 0), run)
    return {id: run for id, run in runs.items() if run > 1 and _by_tokens(spreads[id])}


def _by_tokens(s: Spread) -> bool:
    """Whether dp ranks have single rows, balanced by their lengths."""
    return s.granularity == "row" and s.balance_by == "tokens" and not s.leaves


def pays(saved: float, tokens: float) -> bool:
    """Whether a backend computes the prompts of a micro-batch once. saved: tokens that it then has less. tokens: that
    it has otherwise."""
    return saved * MIN_SAVED >= tokens > 0
