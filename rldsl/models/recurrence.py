"""What modules that carry a state from token to token need in memory, found by trials on the meta device.

In: a model of transformers on the meta device, and how it runs. Out: a `Recurrence` for each kind of such layers. A
trial runs the module's own code on shapes without storage, forward and backward, and counts the storages that its
operations make while they live. So nothing is assumed of a family. Trials of several widths give what each sequence,
each token and each chunk of a scan adds; the chunk is found where the growth with the tokens jumps.
Invariant: a module that fails on the meta device has no `Recurrence`, and `uncounted` names it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from rldsl.models.execution import ATTENTION_INTERFACE, CACHES, Execution, names_of
from rldsl.models.trials import ITEMSIZES, backward_pass, quiet, renew, storages, without_storage
from rldsl.plan.model import Growth, Recurrence

ROWS = (2, 4)  # sequences of two trials, whose difference is what sequences need
FEW = 8  # tokens of a trial without chunks
MAX_CHUNK = 512  # tokens: no scan of transformers has larger chunks


def recurrences(model: Any, body: Any, how: Execution) -> tuple[Recurrence, ...]:
    """Of the layers with modules that carry a state, by kind, for each size of an element in bytes. body: the model
    below its head."""
    kinds: dict[Any, list[int]] = {}
    first: dict[Any, list[str]] = {}
    for number in range(how.num_layers):
        prefix = f"{how.layers}.{number}."
        modules = [name for name in how.recurrent if name.startswith(prefix)]
        if how.by_rows or not modules:
            continue
        layer = body.get_submodule(prefix[:-1])
        attends = any(ATTENTION_INTERFACE in names_of(type(m)) for m in layer.modules())
        shapes = tuple((n, tuple(p.shape)) for name in modules for n, p in body.get_submodule(name).named_parameters())
        kinds.setdefault((shapes, attends), []).append(number)
        first.setdefault((shapes, attends), modules)
    found = []
    with quiet():
        for key, numbers in kinds.items():
            parts: list[Recurrence | None] = [None] * len(first[key])
            for item in ITEMSIZES:
                parts = [_of_module(body.get_submodule(name), model.config, item, known)
                         for name, known in zip(first[key], parts, strict=True)]
                if all(parts):
                    found.append(_joined(parts, item, tuple(numbers), key[1], [
                        name.removeprefix(f"{how.layers}.{numbers[0]}.") for name in first[key]]))
    return tuple(found)


def uncounted(how: Execution, found: Sequence[Recurrence]) -> str:
    """What of a model the memory estimate leaves out, for messages; "": nothing that is known."""
    if how.by_rows:
        return "attention in padded rows, and decoding from the beginning of each sequence"
    counted = {number for r in found for number in r.layers}
    missing = [name for name in how.recurrent if not any(name.startswith(f"{how.layers}.{n}.") for n in counted)]
    return f"the states of {missing[0]}" + f" and {len(missing) - 1} more" * (len(missing) > 1) if missing else ""


def _joined(parts: list[Any], item: int, layers: tuple[int, ...], attends: bool, names: list[str]) -> Recurrence:
    """Modules of one layer run one after the other."""
    def most(of: Callable[[Any], Growth]) -> Growth:
        return max(map(of, parts), key=lambda g: g.bytes(4 * MAX_CHUNK))

    saved = [p.saved for p in parts]
    total = Growth(sum(g.sequence for g in saved), sum(g.token for g in saved), max(g.chunk for g in saved),
                   sum(g.single for g in saved), sum(g.per_chunk for g in saved), sum(g.squared for g in saved))
    return Recurrence(item, layers, attends, tuple(names), total, most(lambda p: p.forward),
                      most(lambda p: p.backward), sum(p.state for p in parts), max(p.step for p in parts),
                      sum(p.outputs for p in parts), sum(p.written for p in parts), sum(p.operations for p in parts))


def _of_module(module: Any, config: Any, item: int, known: Recurrence | None) -> Recurrence | None:
    """known: what was found with another size of an element, which grows in the same way."""
    import torch

    try:
        with torch.device("meta"):
            part = copy.deepcopy(module)
        with without_storage(item):
            renew(part)
            width = _width(part, config)
            state, step, outputs = _decoding(part, config, width)
            grown = (known.saved, known.forward, known.backward) if known is not None else None
            chunk = grown[0].chunk if grown else _chunk(lambda tokens: _saved(part, tokens, width))
            saved, forward, backward = _growths(lambda rows, tokens: _trial(part, rows, tokens, width), chunk,
                                                grown is None or any(g.squared for g in grown))
            written, operations = _work(part, 2 * chunk or FEW, width)
    except Exception:  # a family's code may need anything at all
        return None
    return Recurrence(item, (), False, (), saved, forward, backward, state, step, outputs, written, operations)


def _growths(trial: Callable[[int, int], tuple[int, ...]], chunk: int, squared: bool) -> tuple[Growth, ...]:
    """trial: (sequences, tokens of each) -> bytes of each kind, of which some belong to weights. chunk: tokens of a
    chunk, 0: there are none. squared: whether chunks may need something for each pair of them."""
    few, many = ROWS
    multiples = (1, 2, 3, 4) if squared else (1, 2, 3)
    lengths = (chunk // 2, *(n * chunk for n in multiples)) if chunk else (FEW, 2 * FEW)
    fewer, *of_many = trial(few, lengths[0]), *(trial(many, n) for n in lengths)
    of_weights = [a - few * (b - a) // (many - few) for a, b in zip(fewer, of_many[0], strict=True)]
    of_lengths = [[(x - w) // many for x, w in zip(of_length, of_weights, strict=True)] for of_length in of_many]
    kinds = zip(*of_lengths, strict=True)
    return tuple(_chunked(chunk, *found) if chunk else _straight(*found) for found in kinds)


def _chunked(chunk: int, half: int, one: int, *more: int) -> Growth:
    """From the bytes of half a chunk, of one, of two and three, and perhaps of four."""
    token = (one - half) // (chunk - chunk // 2)
    single, two, three, *fourth = (x - n * chunk * token for n, x in enumerate((one, *more), 1))
    squared = (fourth[0] - 2 * three + two) // 2 if fourth else 0
    each = three - two - 5 * squared
    return Growth(two - 2 * each - 4 * squared, token, chunk, single, each, squared)


def _straight(few: int, more: int) -> Growth:
    token = (more - few) // FEW
    return Growth(few - FEW * token, token)


def _chunk(saved: Callable[[int], tuple[int, int]]) -> int:
    """Tokens of a chunk; 0: every token adds the same, as where a loop runs over tokens."""
    (low, few), (next_, more) = saved(2), saved(3)
    each = next_ - low
    if more > few:
        return 0

    def straight(tokens: int) -> bool:
        return saved(tokens)[0] == low + (tokens - 2) * each

    top = 8
    while straight(top):
        if top > MAX_CHUNK:
            return 0
        top *= 2
    least = top // 2 if top > 8 else 3
    while top - least > 1:
        middle = (least + top) // 2
        least, top = (middle, top) if straight(middle) else (least, middle)
    return least if least > 3 else 0


def _width(module: Any, config: Any) -> int:
    """Of the hidden states that a module reads."""
    return int(getattr(module, "hidden_size", 0) or config.get_text_config().hidden_size)


def _call(module: Any, hidden: Any, cache: Any = None) -> Any:
    """The output for hidden states alone; other arguments without a default are None."""
    names = list(inspect.signature(module.forward).parameters.values())
    given = {p.name: None for p in names[1:]
             if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    given |= {p.name: cache for p in names[1:] if p.name in CACHES and cache is not None}
    out = module(hidden, **given)
    return out[0] if isinstance(out, tuple) else out


def _saved(module: Any, tokens: int, width: int) -> tuple[int, int]:
    """(bytes that one sequence keeps for the backward pass, operations of torch)."""
    with storages() as count:
        out = _call(module, _hidden(1, tokens, width).clone())
        node = out.grad_fn  # which keeps what the backward pass needs
        del out  # what reads it keeps what it needs of it
        kept, calls = count.now, count.calls
    del node
    return kept, calls


def _trial(module: Any, rows: int, tokens: int, width: int) -> tuple[int, int, int]:
    """(saved, peak of the forward pass without saving, peak of the backward pass), in bytes."""
    import torch

    with storages() as count, torch.no_grad():
        _call(module, _hidden(rows, tokens, width).clone())
        forward = count.most
    saved, backward = backward_pass(lambda: _call(module, _hidden(rows, tokens, width).clone()))
    module.zero_grad()
    return saved, forward, backward


def _work(module: Any, tokens: int, width: int) -> tuple[int, int]:
    """(bytes that operations of a forward pass write, operations with numbers besides those of products with the
    module's parameters), for each token. tokens: of a trial; there is a second one of twice as many."""
    import torch

    found = []
    for length in (tokens, 2 * tokens):
        with storages() as count, torch.no_grad():
            _call(module, _hidden(1, length, width).clone())
            found.append((count.made, count.operations))
    made, operations = ((b - a) // tokens for a, b in zip(*found, strict=True))
    return made, max(operations - 2 * sum(p.numel() for p in module.parameters() if p.dim() > 1), 0)


def _hidden(rows: int, tokens: int, width: int) -> Any:
    import torch

    return torch.empty(rows, tokens, width, requires_grad=True)


def _decoding(module: Any, config: Any, width: int) -> tuple[int, int, int]:
    """(bytes of the state, peak of a decoding step, outputs of all its operations), per sequence."""
    import torch
    from transformers import DynamicCache

    found = []
    for rows in ROWS:
        cache = DynamicCache(config=config)
        with torch.no_grad():
            _call(module, torch.empty(rows, FEW, width), cache)
            state = sum(x.nbytes for layer in cache.layers for kind in ("conv_states", "recurrent_states")
                        for x in (getattr(layer, kind, None) or {}).values() if x is not None)
            with storages() as count:
                _call(module, torch.empty(rows, 1, width), cache)
                found.append((state, count.most, count.made))
    few, more = found
    state, step, outputs = ((b - a) // (ROWS[1] - ROWS[0]) for a, b in zip(few, more, strict=True))
    return state, step, outputs
