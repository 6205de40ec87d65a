"""Calls and computations: what they read and write, and that their fields fit the records that they name.

In: tables with sound references, an Infer, Train or Compute (`generation.py` has Generate). Out: diagnostics RL0614
(reads and writes) and RL0615 (fields that contradict each other). Extra reads are allowed where they carry what the
operation needs anyway (lengths, columns).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rldsl.diag import Diagnostic
from rldsl.plan.arrays import ROWS
from rldsl.plan.backends import described
from rldsl.plan.events import AnyCall, Compute, Derive, Event, Generate, Infer, Train, split_buffer
from rldsl.plan.function import frames_of_call
from rldsl.plan.heads import DISTRIBUTION, OUTPUTS, TOP, heads_with
from rldsl.plan.model import Layout, Mesh, Model, Ranges, Value
from rldsl.plan.router_bias import updatable
from rldsl.sharding.gradient_leaves import LEAVES, divides, pass_tokens
from rldsl.sharding.sum_blocks import undividable
from rldsl.verify.tables import Tables, name, problem


def own(*frames: str) -> set[str]:
    """What a call may read of its frames beyond what it must."""
    return {f"{f}.{part}" for f in frames for part in ("tokens", "lengths", "columns", "finished")}


def reads(t: Tables, e: Event, must: set[str], may: set[str], spread: str, copy: str = "") -> Iterator[Diagnostic]:
    """Every value of `must` once, others of `may`, each in the event's own spread or for all rows; and `copy`."""
    values = [split_buffer(b)[0] for b in e.reads if b != copy]
    if copy and copy not in e.reads:
        yield problem("RL0614", f"{name(e)} does not read {copy}", e)
    if len({*e.reads}) != len(e.reads) or len({*values}) != len(values):
        yield problem("RL0614", f"{name(e)} reads a buffer twice: {', '.join(e.reads)}", e)
    for value in sorted(must - {*values}):
        yield problem("RL0614", f"{name(e)} does not read {value}", e)
    for value in sorted({*values} - must - may):
        yield problem("RL0614", f"{name(e)} reads {value}, which its expression does not use", e)
    for buffer in e.reads:
        right = split_buffer(buffer)[1]
        if buffer != copy and (right not in t.spreads or right != spread and t.spreads[right].granularity != "all"):
            yield problem(
                "RL0614",
                f"{name(e)} works on spread {spread} and cannot read {buffer}",
                e,
                help="a transfer must move it there first",
            )


def writes(t: Tables, e: Event, must: set[str], may: set[str], spread: str, copy: str = "") -> Iterator[Diagnostic]:
    """Every value of `must` once, others of `may`, in the event's own spread."""
    values = [split_buffer(b)[0] for b in e.writes if b != copy]
    if copy and copy not in e.writes or len({*values}) != len(values) or not must <= {*values} <= must | may:
        wanted = sorted(must) + ([copy] if copy else [])
        yield problem(
            "RL0614", f"{name(e)} must write {', '.join(wanted)}, but writes {', '.join(e.writes) or 'nothing'}", e
        )
    for buffer in e.writes:
        if buffer != copy and split_buffer(buffer)[1] != spread:
            yield problem("RL0614", f"{name(e)} works on spread {spread} and cannot write {buffer}", e)


def check_call(t: Tables, e: AnyCall) -> Iterator[Diagnostic]:
    """What holds of every call of a model: its rows are divided as its layout is, and its passes have room for them."""
    s = t.spreads[e.spread]
    if (
        s.granularity == "all"
        or _degrees(t.layouts[s.layout]) != _degrees(t.layouts[e.layout])
        or _ordered(t.meshes[t.layouts[s.layout].mesh]) != _ordered(t.meshes[t.layouts[e.layout].mesh])
    ):
        yield problem("RL0615", f"{name(e)}: spread {e.spread} divides rows differently from layout {e.layout}", e)
    if e.mbs < 0:
        yield problem("RL0615", f"{name(e)} has mbs {e.mbs}", e)
    if t.models[e.model].invariant and (why := _varies(t.models[e.model], t.layouts[e.layout])):
        yield problem("RL0615", f"{name(e)}: {e.model} is invariant, but {why}", e)
    if isinstance(e, Train) and (why := _gradients_vary(t, e)):
        yield problem("RL0615", f"{name(e)}: {why}", e)
    if isinstance(e, Generate) or e.mbt == 0:
        return
    frames = [t.frames[f] for f in (e.frames if isinstance(e, Train) else (e.frame,)) if f in t.frames]
    longest = sum(f.max_prompt_tokens + f.max_response_tokens for f in frames)
    if e.mbt < longest:
        yield problem("RL0615", f"{name(e)} has mbt {e.mbt}, but a row has up to {longest} tokens", e)


def _varies(m: Model, x: Layout) -> str:
    """Why the numbers of a token depend on what is computed with it or where, or ""."""
    if found := undividable((*m.params, *m.base), x.tp):
        return f"tp={x.tp} of layout {x.id} does not divide the {found[1]} blocks in which {found[0]} is summed"
    backend = described(x.backend)
    return "" if backend is not None and backend.invariant else f"backend {x.backend!r} does not support it"


def _gradients_vary(t: Tables, e: Train) -> str:
    """Why the gradients of a model with `invariant_training` depend on where it is trained, or ""."""
    x, s, wanted = t.layouts[e.layout], t.spreads[e.spread], t.models[e.model].invariant_training
    if s.leaves != (LEAVES if wanted else 0):
        return f"spread {e.spread} has {s.leaves} leaves"
    if not wanted:
        return ""
    if not t.models[e.model].invariant:
        return f"the gradients of {e.model} are invariant, but not what they are computed from"
    if not divides(x.dp, x.cp):
        return f"layout {e.layout} divides the sums of its gradients"
    if e.heads and max(x.tp, x.cp) > 1:
        return f"layout {e.layout} divides the sums of its loss over whole distributions"
    passes = pass_tokens(t.frames[f] for f in e.frames if f in t.frames)
    return "" if e.mbs == 0 and e.mbt >= passes else \
        f"its passes have mbs {e.mbs} and mbt {e.mbt}, not 0 and at least {passes}"


def _ordered(mesh: Mesh) -> Ranges:
    """Its ranks in their order, however they are cut into ranges."""
    joined: list[tuple[int, int]] = []
    for start, stop in mesh.ranks:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def _degrees(x: Layout) -> tuple[int, ...]:
    return x.dp, x.tp, x.pp, x.cp


def check_infer(t: Tables, e: Infer) -> Iterator[Diagnostic]:
    yield from check_call(t, e)
    v, output, head = t.values[e.value], OUTPUTS[e.output_name], t.models[e.model].head
    makes_ids = e.output_name == TOP
    given = {e.ids} if e.ids and not makes_ids else set()
    yield from reads(t, e, {f"{e.frame}.tokens"} | given, own(e.frame), e.spread, f"{e.model}@{e.layout}")
    yield from writes(t, e, {e.value, e.ids} - {""} - given, set(), e.spread)
    whole = e.output_name == DISTRIBUTION
    extent = "hidden" if whole else {"seq": "row", "entry": "entry"}.get(output.level, "response")
    if whole and v.width != t.models[e.model].sizes.hidden:
        yield problem("RL0615", f"{name(e)}: {v.id} has {v.width} numbers for each token, but hidden states have "
                                f"{t.models[e.model].sizes.hidden}", e)
    if (output.level == "entry" and not whole) != bool(e.ids) or e.ids and not _ids_of(t, e.ids, v):
        yield problem("RL0615", f"{name(e)}: {e.ids or 'nothing'} has the ids of the tokens of {v.id}", e)
    elif e.ids and not _has_entries(t, e):
        yield problem("RL0615", f"{name(e)}: the backend of layout {e.layout} has no entry values", e)
    elif makes_ids and (fault := _known_tokens(t, e)):
        yield problem("RL0615", f"{name(e)} {fault}", e)
    if v.frame not in (e.frame, _responses_of(t, e.frame)) or v.extent != extent or v.dtype != "f32":
        yield problem(
            "RL0615",
            f"{name(e)}: {e.output_name} of frame {e.frame} do not match value {v.id} "
            f"({v.frame}, {v.extent}, {v.dtype})",
            e,
        )
    if output not in head.outputs:
        yield problem("RL0615", f"{name(e)}: {e.output_name} need a {' or a '.join(heads_with(output.call))}, "
                      f"but {e.model} "
                      f"is a {head.name}", e)
    if output.logits and e.temperature != t.frames[e.frame].temperature:
        yield problem(
            "RL0615",
            f"{name(e)} uses temperature {e.temperature}, but frame {e.frame} was sampled at "
            f"{t.frames[e.frame].temperature}",
            e,
        )


def _responses_of(t: Tables, frame: str) -> str:
    """The frame whose responses, token by token, the rows of `frame` have after other prompts; "" if they have their
    own."""
    return next((d.source for d, _ in t.events if isinstance(d, Derive) and (d.op, d.frame) == ("reprompt", frame)), "")


def _known_tokens(t: Tables, e: Infer) -> str:
    """Why a `top` may find tokens that a reader of its ids does not know, or ""."""
    vocab = t.models[e.model].sizes.vocab
    words = e.words or vocab
    if not t.values[e.ids].width <= words <= vocab:
        return f"looks for {t.values[e.ids].width} of {words} tokens of {vocab}"
    for other, _ in t.events:
        if isinstance(other, Infer | Train) and other.ids == e.ids and t.models[other.model].sizes.vocab < words:
            return f"finds tokens that {other.model} does not know"
    return ""


def _heads(t: Tables, e: Train, copies: set[str]) -> str:
    """What is wrong with the models whose whole distributions a loss compares, or "": they are where the student is,
    divided alike, do not change, and made what the loss gets."""
    whole = {v for _, v in e.data_inputs if t.values[v].extent == "hidden"}
    if whole != {v for v, _ in e.heads} or len(whole) != len(e.heads) or len(e.head_layouts) != len(e.heads):
        return "does not say whose distributions it gets"
    if not copies <= {*e.reads}:
        return f"does not read {sorted(copies - {*e.reads})[0]}"
    makers = {i.value: i.model for i, _ in t.events if isinstance(i, Infer) and i.output_name == DISTRIBUTION}
    for d, _ in t.events:
        if isinstance(d, Derive):
            makers |= {new: makers[old] for old, new in d.values if old in makers}
    mine, a = t.models[e.model], t.layouts[e.layout]
    for (value, name_), layout in zip(e.heads, e.head_layouts, strict=True):
        model, b = t.models[name_], t.layouts[layout]
        if makers.get(value) != name_ or model.head is not mine.head or model.sizes.vocab != mine.sizes.vocab:
            return f"gets {value}, which is not a distribution of {name_} over the tokens of {e.model}"
        if model.train_layout or model.updated_from:
            return f"reads the head of {name_}, which changes"
        if _ordered(t.meshes[a.mesh]) != _ordered(t.meshes[b.mesh]) or _degrees(a) != _degrees(b) \
                or a.backend != b.backend:
            return f"reads the head of {name_} in layout {layout}, which divides it otherwise than {e.layout}"
    return ""


def _has_entries(t: Tables, e: Infer | Train) -> bool:
    backend = described(t.layouts[e.layout].backend)
    return backend is not None and backend.entries


def _ids_of(t: Tables, ids: str, v: Value) -> bool:
    """Whether a value has the ids of the tokens of an entry value."""
    of = t.values[ids]
    return v.entries == ids and (of.extent, of.dtype, of.frame, of.width) == ("entry", "i64", v.frame, v.width)


def check_train(t: Tables, e: Train) -> Iterator[Diagnostic]:
    yield from check_call(t, e)
    copy = f"{e.model}@{e.layout}"
    must = {f"{f}.tokens" for f in e.frames} | {v for _, v in e.data_inputs} | ({e.rate, e.ids} - {""})
    read_heads = {f"{model}@{layout}" for model, layout in zip((m for _, m in e.heads), e.head_layouts, strict=False)}
    yield from reads(t, replace(e, reads=tuple(b for b in e.reads if b not in read_heads)), must, own(*e.frames),
                     e.spread, copy)
    if fault := _heads(t, e, read_heads):
        yield problem("RL0615", f"{name(e)} {fault}", e)
    if e.rate and (t.values[e.rate].level, t.values[e.rate].dtype) != ("batch", "f32"):
        yield problem("RL0615", f"{name(e)}: the learning rate {e.rate} is not a number of the batch level", e)
    if e.router_bias_update_rate and not (0 < e.router_bias_update_rate <= 1 and updatable(t.models[e.model])):
        yield problem("RL0615", f"{name(e)}: no router biases of {e.model} move by {e.router_bias_update_rate}", e)
    yield from writes(t, e, {v for _, v in e.outputs}, set(), e.spread, copy)
    for _, frame, what in e.model_outputs:
        if frame not in e.frames or OUTPUTS.get(what) not in t.models[e.model].head.outputs:
            yield problem("RL0615", f"{name(e)}: the head of {e.model} has no output {what}, or {frame} is not a frame "
                                    "of the call", e)
    asked = {frame for _, frame, what in e.model_outputs if OUTPUTS[what].level == "entry"}
    if (e.ids or e.heads) and not _has_entries(t, e):
        yield problem("RL0615", f"{name(e)}: the backend of layout {e.layout} has no entry values", e)
    one = bool(e.ids) + bool(e.heads)
    if one != bool(asked) or e.ids and (t.values[e.ids].entries != e.ids or asked != {t.values[e.ids].frame}):
        yield problem("RL0615", f"{name(e)}: {e.ids or 'nothing'} has the ids of the tokens that the loss asks for", e)
    if not e.frames or any((t.values[v].level, t.values[v].dtype) != ("batch", "f32") for _, v in e.outputs):
        yield problem("RL0615", f"{name(e)} needs a frame, and outputs at the batch level", e)


def check_compute(t: Tables, e: Compute) -> Iterator[Diagnostic]:
    must = {v for _, v in e.inputs}
    sources = {t.frames[f].data for f in e.frames}
    for node in t.programs[e.program].nodes:
        must |= {f"{node.space}.turn_sizes"} if node.level == "turn" else set()
        if node.op == ROWS:
            must.add(f"{node.attr('frame')}.tokens")
        if node.op == "py" and str(node.attr("frame")) in t.frames:  # `programs.py` reports others
            of = t.frames[str(node.attr("frame"))].root_origin
            must |= {f"{frame}.tokens" for _, frame in frames_of_call(node.attrs)}
            must |= {v.id for v in t.plan.values if v.extent == "columns" and t.frames[v.frame].prompt_space == of}
    kin = {f.id for f in t.plan.frames if f.data in sources}
    yield from reads(t, e, must, own(*kin), e.spread)
    yield from writes(t, e, {v for _, v in e.outputs}, set(), e.spread)
