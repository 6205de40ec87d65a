"""Modules that look at other tokens than their own, inside a pass over packed sequences.

In: the modules of a family, and what `models/execution.py` says of them. Out: the same modules, which ask the pass
under way (`CurrentPass`) how its sequences lie: attention reads it in `attention.py`, and recurrent modules get each
sequence as a separate row, with the state that the sequence has reached.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from rldsl.backends.torch.model.row_groups import RowGroups
from rldsl.diag import internal_error
from rldsl.models.execution import ATTENTION_INTERFACE, CACHES, masked_window, names_of, scans_from_a_state

ROLE = "rldsl_role"  # attribute of modules that attend: their `AttentionRole`
MASKS = ("attention_mask", "conv_mask", "padding_mask")  # and those that hide padding: there is none before a token

# ([S, W, ...] of each input, states of the sequences or None) -> [S, W, ...] of each output; padding is at the end
RowFunction = Callable[[tuple[torch.Tensor, ...], Any], tuple[torch.Tensor, ...]]


class Sequences(Protocol):
    """How the tokens of a pass make up sequences."""

    positions: torch.Tensor  # [T] int64, of the row's tokens in their sequences
    complete: bool  # whether all tokens of the sequences are here, from the first one on

    def by_rows(self, place: int, run: RowFunction, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Run a function that needs complete sequences, from their first token on. inputs: [T, ...] each. place: of the
        function in the model, for what is kept of earlier passes: its inputs. Returns [T, ...] each."""

    def recur(self, place: int, run: RowFunction, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Run a function that continues sequences from their states. place: of the function in the model."""


class DividedSequences:
    """The part of a `Sequences` whose ranks divide each sequence: no module may need complete ones."""

    complete = False

    def by_rows(self, place: int, run: RowFunction, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Errors: RL0699, since the compiler refuses such a layout."""
        raise internal_error("a module needs complete sequences, which several ranks divide", "sequences")

    recur = by_rows


class CurrentPass:
    """The pass that a stage is in."""

    def __init__(self) -> None:
        self.sequences: Any = None  # a `PackedAttention`; None outside passes
        # [tokens] int64, where loads of experts are counted: how often whole sequences have each token of the pass
        self.copies: torch.Tensor | None = None
        # to the sequences that were current when a module attended last; those of decoding have a KV cache
        self._counted: Callable[[], Any] = lambda: None
        self._calls: dict[int, int] = {}  # place of a module -> how often it has attended to them

    @property
    def row_groups(self) -> RowGroups:
        """By which gradients of this pass are summed; () where they have no order."""
        return getattr(self.sequences, "row_groups", ())

    def count(self, place: int) -> int:
        """How often a module has attended in this pass before: some attend twice, and some run several times."""
        if self._counted() is not self.sequences:
            self._counted, self._calls = weakref.ref(self.sequences), {}
        self._calls[place] = self._calls.get(place, -1) + 1
        return self._calls[place]

    def inside(self, sequences: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """plain(*args, **kwargs), with `sequences` as the current ones."""
        before, self.sequences = self.sequences, sequences
        try:
            return plain(*args, **kwargs)
        finally:
            self.sequences = before

    def counting(self, copies: torch.Tensor | None, plain: Callable[..., Any], *args: Any) -> Any:
        """plain(*args), in which the loads of experts are counted unless `copies` is None."""
        before, self.copies = self.copies, copies
        try:
            return plain(*args)
        finally:
            self.copies = before


class AttentionRole:
    """What an attention module must know of its model."""

    def __init__(self, current: CurrentPass, place: int, count: int, window: int | None, compiled: bool):
        self.current = current  # the pass under way
        self.window = window  # of a family that knows it for its mask alone
        self.compiled = compiled  # kernels that the machine has compiled may compute it
        self.place, self.count = place, count  # its number among the modules that attend, and how many there are

    def number(self) -> int:
        """Of this call, the same in each pass: where its keys and values are kept."""
        return self.place + self.count * self.current.count(self.place)


def connect(body: nn.Module, recurrent: tuple[str, ...], current: CurrentPass, compiled: bool = False) -> None:
    """Connect the modules of `body` with the pass under way. recurrent: names of those that carry a state. compiled:
    kernels that the machine has compiled may compute attention."""
    attending = [m for m in body.modules() if ATTENTION_INTERFACE in names_of(type(m))]
    window = masked_window(body)
    for place, module in enumerate(attending):
        setattr(module, ROLE, AttentionRole(current, place, len(attending), window, compiled))
    for place, name in enumerate(recurrent):
        module = body.get_submodule(name)
        module.forward = _by_sequence(module.forward, place, current, scans_from_a_state(type(module)))


def _by_sequence(plain: Callable[..., Any], place: int, current: CurrentPass, scans: bool) -> Callable[..., Any]:
    """The forward of a recurrent module, on packed sequences. All its arguments that have a row for each token are cut
    up with the hidden states. scans: see `scans_from_a_state`."""
    signature = inspect.signature(plain)
    rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")
    caches = [name for name in CACHES if name in signature.parameters]

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = dict(signature.bind(*args, **kwargs).arguments)
        given |= given.pop(rest, {})
        tokens = next(x.shape[1] for x in given.values() if isinstance(x, torch.Tensor) and x.dim() > 2)
        inputs: list[torch.Tensor] = []
        tuples: list[bool] = []  # whether the result was a tuple
        named = {name: _take(x, tokens, inputs) for name, x in given.items() if name not in MASKS}

        def run(rows: tuple[torch.Tensor, ...], state: Any) -> tuple[torch.Tensor, ...]:
            if scans or state is None or not state.continues:
                return run_at_once(rows, state)
            steps = (run_at_once(step, state) for step in zip(*(x.split(1, 1) for x in rows), strict=True))
            return tuple(torch.cat(outputs, 1) for outputs in zip(*steps, strict=True))

        def run_at_once(rows: tuple[torch.Tensor, ...], state: Any) -> tuple[torch.Tensor, ...]:
            out = plain(**{name: _put(x, rows) for name, x in named.items()} | dict.fromkeys(caches, state))
            tuples.append(isinstance(out, tuple))
            return tuple(x for x in out if x is not None) if isinstance(out, tuple) else (out,)

        results = tuple(x[None] for x in current.sequences.recur(place, run, tuple(inputs)))
        return results if tuples[0] else results[0]

    return forward


class _Input:
    """In place of an argument: its number among the inputs."""

    def __init__(self, number: int):
        self.number = number


# no function of a pass refers to itself: a cycle would hold the tensors of the pass until garbage is collected
def _take(x: Any, tokens: int, inputs: list[torch.Tensor]) -> Any:
    """Replace what has a row for each token by its number among the inputs."""
    if isinstance(x, torch.Tensor) and x.dim() > 1 and x.shape[:2] == (1, tokens):
        inputs.append(x[0])
        return _Input(len(inputs) - 1)
    return tuple(_take(y, tokens, inputs) for y in x) if isinstance(x, tuple) else x


def _put(x: Any, rows: tuple[torch.Tensor, ...]) -> Any:
    """The opposite."""
    if isinstance(x, _Input):
        return rows[x.number]
    return tuple(_put(y, rows) for y in x) if isinstance(x, tuple) else x
