"""How the modules of a family are run on packed sequences: which of them see each token alone, which attend through
transformers' attention interface, which carry a state from token to token, and which must see sequences one by one.

In: a model of transformers, on any device, and its config. Out: an `Execution`. No numbers are computed: the
functions that the code of a class names say what it does.

Where every module that looks at other tokens is of the second or third kind, a whole batch is one packed row
("packed"). Anything else gets each sequence as a separate row, padded at its end ("rows"): causality makes that right
for every causal language model, whatever it does inside, at the price of padding and of decoding without a cache.
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from rldsl.models.vision import LANGUAGE, vision_family

ATTENTION_INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # what a module names that lets others compute its attention
STATE_UPDATES = frozenset({"update_conv_state", "update_recurrent_state"})  # what a module calls that keeps a state
RECURRENT_UPDATE = "update_recurrent_state"  # the one of them that keeps what a recurrence sums up
INITIAL_STATES = frozenset({"initial_state", "initial_states"})  # arguments by which a scan over tokens gets it
WINDOW_MASK = "create_sliding_window_causal_mask"  # what a model calls that hides all but a window
FROM_PADDING = "create_position_ids_from_input_ids"  # what a module calls that numbers tokens by what they are
CACHES = ("cache_params", "past_key_values", "past_key_value", "layer_past")  # what modules call the argument for it
# families whose modules look at other tokens in a way that their code does not show -> what it is
ROWS: dict[str, str] = {
    "doge": "its mask depends on values",
}
# keys of a config that name a cap c of logits: a logit z counts as c * tanh(z / c)
LOGIT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
LAYER = ""  # in a list of called modules: a layer


@dataclass(frozen=True, slots=True)
class Execution:
    """How a family runs."""

    layers: str                  # dotted name of its list of layers below the head; "" if it has none
    num_layers: int              # in this list
    recurrent: tuple[str, ...]   # modules that carry a state from token to token, below the head
    by_rows: str                 # why every sequence is a separate row; "" if sequences are packed
    outputs: int                 # items of the tuple or list that a layer returns, hidden states first; 0: only these


def body_name(model: Any) -> str:
    """What a model with a head calls the model below it; of a model that reads images, the text model."""
    from transformers import PreTrainedModel

    if isinstance(getattr(model, model.base_model_prefix, None), PreTrainedModel):
        prefix = str(model.base_model_prefix)
        return f"{prefix}.{LANGUAGE}" if vision_family(model.config) else prefix
    return next((name for name, child in model.named_children() if isinstance(child, PreTrainedModel)), "")


def shared_name(names: Sequence[str], prefix: str) -> str:
    """Which of the names of one parameter is the one that directories have: the first below the head. prefix: of the
    model below its head."""
    return next((name for name in names if name.startswith(f"{prefix}.")), names[0])


def keep_weights(config: Any) -> Any:
    """The config of a model whose code does not change its weights. RWKV's halves them, and hidden states with them, so
    that float16 is wide enough for inference; then they would no longer be those that are trained and saved. Without
    it, it computes what it computes in training."""
    if not getattr(config, "rescale_every", 0):
        return config
    kept = copy.deepcopy(config)
    kept.rescale_every = 0
    return kept


def execution(body: Any, config: Any) -> Execution:
    """body: the model below its head."""
    name, count = layer_list(body)
    recurrent = tuple(n for n, m in _parts(body) if names_of(type(m)) & STATE_UPDATES)
    kinds: set[Any] = {type(layer) for layer in body.get_submodule(name)} if name else set()
    return Execution(name, count, recurrent, _by_rows(body, str(config.model_type), set(recurrent)),
                     max(map(_outputs, kinds), default=0))


def scans_from_a_state(kind: Any) -> bool:
    """Whether a module of this class that has a state takes several new tokens at once. Those of Mamba's first version
    take one: their scan over several begins without a state."""
    names = names_of(kind)
    return RECURRENT_UPDATE not in names or bool(names & INITIAL_STATES)


def layer_list(body: Any) -> tuple[str, int]:
    """(dotted name, length) of the list of modules that has most of a model's parameters: its layers."""
    import torch

    lists = {name: m for name, m in body.named_modules() if isinstance(m, torch.nn.ModuleList) and len(m)}
    sizes = {name: sum(p.numel() for p in m.parameters()) for name, m in lists.items()}
    outer = [n for n in lists if not any(n.startswith(other + ".") for other in lists)]
    best = max(outer, key=lambda n: sizes[n], default="")
    return best, len(lists[best]) if best else 0


def masked_window(body: Any) -> int | None:
    """The sliding window of a model whose layers all have it, and which gives it to its mask alone."""
    from transformers import PreTrainedModel

    config = body.config
    made = any(WINDOW_MASK in names_of(type(m)) for m in body.modules() if isinstance(m, PreTrainedModel))
    window = getattr(config, "sliding_window", None) if made and not getattr(config, "layer_types", None) else None
    return int(window) if window else None


def called_after_layers(body: Any, how: Execution) -> frozenset[str] | None:
    """The modules below `body` (dotted names, outermost ones) that work on what its layers give; None if a trial
    without layers does not show it. The trial is on zeros that take no memory; the model is on the meta device before
    and after."""
    import torch

    if not how.layers:
        return None
    parent, name = body.get_submodule(how.layers.rpartition(".")[0]), how.layers.rpartition(".")[2]
    own, inner = getattr(parent, name), {*_prefixes(how.layers)}
    outer = [n for n, _ in body.named_modules() if n and n not in inner and n.rpartition(".")[0] in {"", *inner}
             and not n.startswith(how.layers + ".")]
    calls: list[str] = []

    def note(called: str) -> Any:
        return lambda *_: calls.append(called)

    hooks = [body.get_submodule(n).register_forward_pre_hook(note(n)) for n in outer]
    setattr(parent, name, torch.nn.ModuleList([_stub(calls, how, layer) for layer in own]))
    try:
        with torch.no_grad(), _on_zeros(body):
            body(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)
    except Exception:  # a family's forward may need anything at all
        return None
    finally:
        setattr(parent, name, own)
        for hook in hooks:
            hook.remove()
    if LAYER not in calls:
        return None
    return frozenset(calls[max(i for i, n in enumerate(calls) if n == LAYER) + 1 :])


@contextmanager
def _on_zeros(body: Any) -> Iterator[None]:
    """Every tensor of the model on the processor inside, as zeros that take no memory."""
    import torch

    saved = [(m, kind, n, x) for m in body.modules() for kind in ("_parameters", "_buffers")
             for n, x in getattr(m, kind).items() if x is not None]
    for module, kind, n, x in saved:
        zeros = torch.zeros((), dtype=x.dtype).expand(x.shape)
        getattr(module, kind)[n] = torch.nn.Parameter(zeros, requires_grad=False) if kind == "_parameters" else zeros
    try:
        yield
    finally:
        for module, kind, n, x in saved:
            getattr(module, kind)[n] = x


def _stub(calls: list[str], how: Execution, layer: Any) -> Any:
    """In place of a layer: notes that it was called."""
    import torch

    class Stub(torch.nn.Module):
        def forward(self, hidden_states: Any, *_: Any, **__: Any) -> Any:
            calls.append(LAYER)
            return (hidden_states, *[None] * (how.outputs - 1)) if how.outputs else hidden_states

        def __getattr__(self, name: str) -> Any:  # what a body asks its layers
            return getattr(layer, name)

    return Stub()


def _prefixes(name: str) -> Iterator[str]:
    """a.b.c -> a, a.b, a.b.c"""
    parts = name.split(".")
    return (".".join(parts[: i + 1]) for i in range(len(parts)))


def _by_rows(body: Any, family: str, recurrent: set[str]) -> str:
    if family in ROWS:
        return ROWS[family]
    if bool(getattr(body, "_is_stateful", False)) and not recurrent:
        return "its layers carry a state in a form of their own"
    parts = dict(_parts(body))
    attends = False
    for name, module in parts.items():
        names = names_of(type(module))
        if FROM_PADDING in names:
            return "its positions depend on which tokens are padding"
        if ATTENTION_INTERFACE in names:
            attends = True
            if name in recurrent:
                return f"{type(module).__name__} attends and carries a state"
        elif name not in recurrent and _caches(type(module)) and not any(
                n in recurrent or ATTENTION_INTERFACE in names_of(type(m)) for n, m in parts.items()
                if n.startswith(name + ".")):
            return f"{type(module).__name__} keeps what it needs of earlier tokens in a form of its own"
    if attends and "position_ids" not in inspect.signature(body.forward).parameters:
        return "it numbers the tokens of a row on its own"
    return "" if attends or recurrent else "its attention does not use transformers' attention interface"


def _parts(body: Any) -> Iterator[tuple[str, Any]]:
    """(dotted name, module) of everything that is not itself a model: models look at their parts' code."""
    from transformers import PreTrainedModel

    return ((name, module) for name, module in body.named_modules() if not isinstance(module, PreTrainedModel))


def names_of(kind: Any) -> frozenset[str]:
    """What the methods of a module's class, below torch's own, name; arguments of their calls among it."""
    return _names(kind)


@cache  # not of `names_of`, since mypy takes classes of modules for unhashable
def _names(kind: Any) -> frozenset[str]:
    found: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.startswith("torch."):
            break
        for function in vars(base).values():
            code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
            if code is not None:
                found |= set(code.co_names)
                found |= {x for c in code.co_consts if isinstance(c, tuple) for x in c if isinstance(x, str)}
    return frozenset(found)


@cache
def _outputs(kind: Any) -> int:
    """How many items a layer returns, its hidden states first, from the source of its forward; 0: not a tuple."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward))))
    except (OSError, SyntaxError, AttributeError, TypeError):
        return 0
    made: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and (size := _items(node.value, {})):
            made |= {t.id: max(size, made.get(t.id, 0)) for t in node.targets if isinstance(t, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.If):
            either, other = _added(node.body), _added(node.orelse)
            made |= {name: made[name] + size for name, size in either.items() if name in made and name in other}
    return max((_items(value, made) for value in _returned(tree)), default=0)


def _items(value: ast.expr, made: Mapping[str, int]) -> int:
    """The items of an expression that is a tuple or a list; 0 if it is none. made: names of these, and their items."""
    match value:
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return len(items)
        case ast.BinOp(left=left, op=ast.Add(), right=ast.Tuple() | ast.Subscript()):
            return _items(left, made) if isinstance(left, ast.Tuple | ast.List) else 0
        case ast.BinOp(left=ast.Tuple(elts=items), op=ast.Add()):
            return len(items)
        case ast.Name(id=name):
            return made.get(name, 0)
    return 0


def _added(block: Sequence[ast.stmt]) -> dict[str, int]:
    """How many items the statements of a block add to a tuple by its name."""
    return {node.target.id: _items(node.value, {}) for node in block
            if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and isinstance(node.target, ast.Name)}


def _caches(kind: Any) -> bool:
    """Whether the forward of a module is given a cache."""
    try:
        names = inspect.signature(kind.forward).parameters
    except (AttributeError, TypeError, ValueError):
        return False
    return any(name in names for name in CACHES)


def _returned(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Return) and node.value is not None:
            yield node.value
