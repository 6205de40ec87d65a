"""Each record is well formed: its numbers lie where they have a meaning, and its fields fit each other.

In: tables with sound references. Out: diagnostics RL0612. What several records must agree on is checked later, except
between a value and its entries, and between the experts of a layout and its model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from rldsl.diag import Diagnostic
from rldsl.plan.backends import described
from rldsl.plan.disk_paths import in_kernel_files
from rldsl.plan.entries import ENTRIES, HIDDEN, vocabulary_space
from rldsl.plan.events import Generate, Sampling
from rldsl.plan.expr import LEVELS
from rldsl.plan.function import Returns
from rldsl.plan.model import ROLES, Data, Layout, Model, Optimizer, ParamSpec, Value
from rldsl.verify.tables import Tables, name, problem

LEVEL_OF = {"tokens": "token", "response": "token", "turn": "turn", "row": "seq", "prompt": "prompt", "batch": "batch",
            "row_numbers": "seq", "table": "batch", "cache": "seq", "stored": "batch", "entry": "entry",
            "hidden": "entry", "array": "batch"}
DTYPES_OF = {"tokens": ("i64",), "lengths": ("i64",), "columns": ("text",), "row_numbers": ("i64",),
             "table": ("f32",), "stored": ("i64",), "turn": ("f32", "bool", "i64"),
             "entry": ("f32", "bool", "i64"), "hidden": ("f32",)}
# style of a parameter -> the dimension along which it is divided
DIVIDED = {"colwise": (0,), "rowwise": (1,), "vocab": (0,), "head": (0,), "experts": (1, 2), "replicated": (),
           "colwise_gather": (0,), "rowwise_split": (1,), "latent": ()}
FACTORS = (".lora_A.weight", ".lora_B.weight")  # they are divided as their modules are, which is another check's


def check_records(t: Tables) -> Iterator[Diagnostic]:
    for x in t.plan.layouts:
        yield from _bad(f"layout {x.id}", _layout(x))
    for m in t.plan.models:
        yield from _bad(f"model {m.name}", _model(m))
        for p in (*m.params, *m.base):
            yield from _bad(f"model {m.name}: parameter {p.name} {p.shape}", _parameter(p, m.layers))
    for d in t.plan.data:
        yield from _bad(f"data {d.name}", _data(d))
    for v in t.plan.values:
        yield from _bad(f"value {v.id}", _value(v) or _entries(t, v))
    for b in t.plan.buffers:
        yield from _bad(f"replay buffer {b.value}", _reads(b.tokenizer or "-"))
    for frame in t.plan.frames:
        yield from _bad(f"frame {frame.id}", _reads(frame.tokenizer or "-"))
    for f in t.plan.functions:
        if f.returns not in get_args(Returns):
            yield from _bad(f"function {f.id}", f"returns {f.returns}")
        yield from _bad(f"function {f.id}", _reads(f.path))
    for e, _ in t.events:
        if isinstance(e, Generate) and (fault := _sampling(e.sampling)):
            yield problem("RL0612", f"{name(e)} {fault}", e)
    yield from _experts(t)


def _experts(t: Tables) -> Iterator[Diagnostic]:
    """As many experts on each of the ranks that share them."""
    buffers = {tuple(b.split("@", 1)) for e, _ in t.events for b in (*e.reads, *e.writes)}
    for m in t.plan.models:
        counts = {p.experts for p in (*m.params, *m.base) if p.experts}
        for x in t.plan.layouts:
            if any(n % x.ep for n in counts) and (x.id == m.train_layout or (m.name, x.id) in buffers):
                yield problem("RL0612", f"layout {x.id} has ep={x.ep}, which does not divide the experts of model "
                              f"{m.name}")


def _bad(where: str, fault: str) -> Iterator[Diagnostic]:
    if fault:
        yield problem("RL0612", f"{where} {fault}")


def _layout(x: Layout) -> str:
    if described(x.backend) is None:  # its name is imported
        return f"has the unknown backend {x.backend!r}"
    if x.ep < 1 or not 0 <= x.zero <= 3:
        return f"has ep={x.ep} zero={x.zero}"
    if x.vpp < 1 or x.vpp > 1 and x.pp == 1:
        return f"has vpp={x.vpp} with pp={x.pp}"
    return f"has ep={x.ep} with dp={x.dp} and cp={x.cp}" if x.dp % x.ep or x.ep > 1 and x.cp > 1 else ""


def _model(m: Model) -> str:
    if m.dtype not in ("float32", "bfloat16"):
        return f"has dtype {m.dtype}; expected float32 or bfloat16"
    if m.layers < 1:
        return f"has {m.layers} layers"
    if fault := _reads(m.path, *((m.lora.path,) if m.lora else ())):
        return fault
    return _optimizer(m.optimizer) if m.optimizer else ""


def _optimizer(o: Optimizer) -> str:
    scales = [x for g in o.groups for x in (g.lr_scale, g.weight_decay) if x is not None]
    if min(o.lr, o.eps, o.weight_decay, o.warmup, o.clip_grad, o.min_lr_ratio, o.adamw_lr, *scales) < 0:
        return "has an optimizer with a number below 0"
    if not (0 <= o.momentum < 1 and o.beta2_decay <= 0 and o.clip_threshold >= 1 and 1 <= o.ns_steps < 100):
        return (f"has an optimizer with momentum {o.momentum}, beta2_decay {o.beta2_decay}, clip_threshold "
                f"{o.clip_threshold} and {o.ns_steps} Newton-Schulz iterations")
    if o.nesterov and not o.momentum:
        return "has an optimizer with Nesterov momentum 0"
    return "" if all(0 <= b < 1 for b in o.betas) else f"has an optimizer with betas {o.betas}"


def _sampling(s: Sampling) -> str:
    if s.n < 1 or s.max_new_tokens < 1 or not 0 <= s.min_new_tokens <= s.max_new_tokens:
        return f"generates {s.n} completions of {s.min_new_tokens} to {s.max_new_tokens} tokens"
    if not s.greedy and not (s.temperature > 0 and 0 < s.top_p <= 1 and s.top_k >= 0 and 0 <= s.min_p <= 1):
        return (f"has invalid sampling options: temperature {s.temperature:g}, top_p {s.top_p:g}, top_k {s.top_k} and "
                f"min_p {s.min_p:g}")
    return ""


def _parameter(p: ParamSpec, layers: int) -> str:
    s, undivided = p.split, "cannot be divided as recorded"
    if any(n < 1 for n in p.shape) or not p.shape and s or p.name.count("{}") > 1:
        return undivided
    several = "{}" in p.name
    if (several or p.layer >= 0) != (p.stage == "layer") or not 0 <= p.layers <= layers:
        return undivided
    if not -1 <= p.layer < layers or several and p.layer >= 0:
        return undivided
    if s and not (0 <= s.dim < len(p.shape) and all(u > 0 and n > 0 for u, n in s.parts)
                  and sum(u * n for u, n in s.parts) == p.shape[s.dim]):
        return undivided
    if p.style not in DIVIDED:
        return f"has the unknown parallel style {p.style!r}"
    along = DIVIDED[p.style]
    if not p.name.endswith(FACTORS) and (s.dim not in along if s else along):
        return f"has the parallel style {p.style}, which does not match its sharding"
    if p.experts and (len(p.shape) != 3 or p.shape[0] != p.experts or p.stored and p.shape[1] % len(p.stored)):
        return f"is recorded with {p.experts} experts"
    return "has a partial gradient although it is sharded" if p.partial_grad and s else ""


def _data(d: Data) -> str:
    if d.batch < 1 or d.max_prompt_tokens < 0 or d.max_answer_tokens < 0:
        return f"has batch {d.batch} and limits {d.max_prompt_tokens}, {d.max_answer_tokens}"
    if tuple(role for role, _ in d.columns) != ROLES[d.row_format] or not all(column for _, column in d.columns):
        return f"of kind {d.row_format} has columns for {', '.join(role for role, _ in d.columns) or 'nothing'}"
    if d.answers and (d.answers < 2 or d.row_format != "answers"):
        return f"of kind {d.row_format} has {d.answers} answers in each row"
    if d.row_format == "prompts" and d.max_answer_tokens:
        return f"of kind prompts has answers of up to {d.max_answer_tokens} tokens"
    if d.max_image_tokens and not (d.images and 1 <= d.max_image_tokens <= (d.max_prompt_tokens or d.max_image_tokens)
                                   and d.over_long != "truncate"):
        return f"has images of up to {d.max_image_tokens} tokens in prompts of up to {d.max_prompt_tokens}"
    return _reads(d.path, d.tokenizer)


def _reads(*paths: str) -> str:
    """What a record names to be read."""
    return next((f"reads {path}, which is not data" for path in paths if "\0" in path or in_kernel_files(path)), "")


def _entries(t: Tables, v: Value) -> str:
    """The entry space of a value, and how many numbers it has for each token."""
    if v.extent == "array":
        return "" if not v.entries and v.width >= 1 else f"has {v.width} numbers and entries {v.entries!r}"
    if v.extent not in (ENTRIES, HIDDEN):
        plain = not v.entries and v.width == 1
        return "" if plain else f"of extent {v.extent} has width {v.width} and entries {v.entries!r}"
    if v.width < 1:
        return f"has {v.width} numbers for each token"
    ids = t.values.get(v.entries)
    if v.extent == HIDDEN:
        fits = v.entries == vocabulary_space(v.frame)
    else:
        fits = ids is not None and (ids.entries, ids.extent, ids.dtype, ids.frame, ids.width) == (
            v.entries, ENTRIES, "i64", v.frame, v.width)
        fits = fits and (v.dtype != "i64" or v.id == v.entries)
    return "" if fits else f"has entries {v.entries!r}, which are not those of its tokens"


def _value(v: Value) -> str:
    if v.level not in LEVELS or LEVEL_OF.get(v.extent, v.level) != v.level:
        return f"has extent {v.extent} at level {v.level}"
    if v.dtype not in DTYPES_OF.get(v.extent, ("f32", "bool")):
        return f"of extent {v.extent} has dtype {v.dtype}"
    return ""
