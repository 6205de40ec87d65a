"""What a rank opens before the first step: data sources, tokenizers, users' functions and environments.

In: the items of the plan that the rank executes. Out: which of these they need, opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rldsl.plan.events import Checkpoint, Compute, Derive, Event, Fetch, Generate, Infer, Item, Train
from rldsl.plan.function import Function, frames_of_call
from rldsl.plan.model import Plan
from rldsl.runtime.interpreter.conversations import Environments
from rldsl.runtime.state.context import RunContext
from rldsl.runtime.state.data_reader import DataReader


def open_sources(context: RunContext, reader: DataReader, items: Sequence[Item], note: Callable[[str], None]) -> None:
    """Open every data source that this rank will need. note: called with each before it is opened."""
    for name in dict.fromkeys(_needed_sources(context, items)):
        note(f"opening the data source `{name}`")
        reader.source(name)
    for frame in dict.fromkeys(_frames_with_texts(context, items)):
        note(f"opening the tokenizer of `{frame}`")
        reader.tokens(context.frames[frame])


def _needed_sources(context: RunContext, items: Sequence[Item]) -> Iterator[str]:
    for event in events_of(items):
        if isinstance(event, Fetch):
            yield event.data
    for frame in _frames_with_texts(context, items):
        if not context.frames[frame].tokenizer:
            yield context.frames[frame].data  # its tokenizer makes the texts
    if any(isinstance(event, Generate | Infer | Train) for event in events_of(items)):  # models read images themselves
        yield from (data.name for data in context.plan.data if data.images)


def _frames_with_texts(context: RunContext, items: Sequence[Item]) -> Iterator[str]:
    """The frames whose tokens become text on this rank, or are made of it."""
    for event in events_of(items):
        if isinstance(event, Generate) and event.conversation is not None:
            yield event.frame
        if isinstance(event, Derive) and event.function:
            yield event.frame
            yield from (frame for _, frame in event.given)
        elif isinstance(event, Compute):
            for node in context.programs[event.program].nodes:
                if node.op == "py":
                    yield from (frame for _, frame in frames_of_call(node.attrs))


def called_functions(context: RunContext, items: Sequence[Item]) -> list[Function]:
    """The users' functions that this rank calls."""
    called = [str(node.attr("function")) for event in events_of(items) if isinstance(event, Compute)
              for node in context.programs[event.program].nodes if node.op == "py"]
    called += [event.function for event in events_of(items) if isinstance(event, Derive) and event.function]
    return [context.functions[name] for name in dict.fromkeys(called)]


def open_environments(context: RunContext, reader: DataReader, items: Sequence[Item], environments: Environments,
                      note: Callable[[str], None]) -> None:
    """Open the environments of this rank: what is wrong with them ends the run before it trains. note: called with
    each before it is opened."""
    for event in events_of(items):
        if isinstance(event, Generate) and event.conversation is not None:
            functions = [context.functions[id] for id in event.conversation.environments]
            frame = context.frames[event.frame]
            axes = context.world.axes(context.world.layouts[event.layout])
            if not axes.talks:
                continue
            note(f"opening the environment {', '.join(f'`{f.name}`' for f in functions)}")
            rows = reader.source(frame.data) if axes.dp.index == 0 else None  # other ranks read the same
            environments.open(event.id, functions, event.conversation, event.sampling, reader.tokens(frame),
                              context.rank, rows, event.at)


def events_of(items: Sequence[Item]) -> Iterator[Event]:
    for item in items:
        if isinstance(item, Event):
            yield item
        else:
            yield from events_of(item.body)


def writes_checkpoints(items: Sequence[Item]) -> bool:
    """Whether the plan has checkpoints."""
    return any(isinstance(event, Checkpoint) for event in events_of(items))


def ends_late_conversations(plan: Plan) -> bool:
    """Whether a time limit may end a conversation, so that the clock decides what is trained on."""
    return any(isinstance(e, Generate) and e.conversation is not None and e.conversation.on_error == "end"
               for e in events_of(plan.body))
