"""What calls of a model cost on this machine, feature by feature (`clusters/model.py`).

In: a model's record, one rank's place in its tensor parallelism, a backend. Out: microseconds. The model is built from
its config with random weights and a few layers, or the first ones up to one of each kind; its real calls are timed
at several shapes, and the cost of each feature is what explains them best. Where layers are of several kinds, the costs
of "layer" and "token" are means over all layers of the model.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch

from rldsl.measure.images import GrayImages
from rldsl.measure.solo_group import SingleRankGroup
from rldsl.plan import backends
from rldsl.plan.events import Sampling
from rldsl.plan.model import Layout, Mesh, Model, Optimizer
from rldsl.runtime.backend import Axes, Axis, Images, PackedBatch, Shard
from rldsl.sharding.dtypes import SIZES

LEAST, MOST = 3, 7  # timings of one thing
ENOUGH = 0.15  # seconds of them
OTHER_NUMBERS = 2**24  # float32, 64 MiB: more than the caches of a processor hold
PLENTY = 2.0  # seconds of them after which even fewer will do
ROUNDING = 1e-9  # a feature that explains a smaller part of the seconds costs nothing: 0, but for rounding
FILLED_CACHE = 2**24  # bytes of parameters, of which the own cache of a processor's core holds a small part
MOST_LAYERS = 8  # that are built for that
ONE, FEW = 1, 4  # tokens generated; from the second to `MeasuredShapes.many`, decoding of shapes that were met before


@dataclass(frozen=True, slots=True)
class MeasuredShapes:
    """What is timed: enough of everything that its cost shows, and not only that of starting it."""

    shapes: tuple[tuple[int, int, int, int], ...]  # (layers, sequences, tokens of each, of these in the response)
    decodes: tuple[tuple[int, int, int], ...]  # (layers, sequences, tokens of a prompt)
    many: int  # tokens generated
    small: int  # tokens of a batch that is also trained on in several micro-batches
    images: int  # tokens of images of a batch, at least


# A batch of 8,192 tokens leaves the caches of a processor between two operators, as those of a run do
PROCESSOR = MeasuredShapes(
    ((2, 1, 32, 16), (2, 4, 32, 16), (2, 16, 32, 31), (2, 16, 32, 4), (2, 48, 48, 24), (2, 4, 192, 96),
     (2, 128, 64, 32), (1, 4, 32, 16), (1, 16, 48, 24)),
    ((2, 1, 16), (2, 8, 16), (2, 32, 16), (2, 16, 96), (1, 8, 16), (1, 32, 16)), 36, 600, 1000)
# A batch of a few hundred tokens takes a GPU as long as launching its kernels. And decoding long enough that captures
# of CUDA graphs, which each call makes anew, weigh as much as in a run
GPU = MeasuredShapes(
    ((2, 1, 512, 256), (2, 8, 512, 256), (2, 16, 512, 500), (2, 16, 512, 32), (2, 16, 1024, 512), (2, 2, 4096, 2048),
     (1, 8, 512, 256), (1, 16, 1024, 512)),
    ((2, 1, 128), (2, 32, 128), (2, 128, 128), (2, 32, 1024), (1, 32, 128), (1, 128, 128)), 260, 5000, 8000)


def median_seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Median seconds, after one run that does not count."""
    work()
    found: list[float] = []
    while not found or sum(found) < PLENTY and len(found) < (LEAST if sum(found) >= ENOUGH else MOST):
        found.append(seconds_once(work, device))
    return statistics.median(found)


def seconds_once(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds. Of a single thread on a processor those that it computes: then other programs on the machine do not
    count."""
    clock = time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    if device.type == "cpu":  # in a step other calls come between, whose numbers are in the caches then
        torch.ones(OTHER_NUMBERS, device=device).sum()
    synchronize(device)
    begin = clock()
    work()
    synchronize(device)
    return clock() - begin


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def build(model: Model, layers: int, tp: int, backend: str, device: torch.device, trainable: bool,
          images: Images | None = None) -> Shard:
    """The shard of the first of `tp` ranks, with `layers` of the model's layers and random weights. images: that its
    vision tower reads."""
    params = tuple(replace(p, layers=min(p.layers, layers))
                   for p in (*model.params, *model.base) if "lora_" not in p.name and p.layer < layers)
    less = replace(model, layers=layers, lora=None, params=params, base=(), train_layout="profile" if trainable else "",
                   optimizer=Optimizer(lr=1e-6), planned_updates=1)
    layout, mesh = Layout("profile", "ranks", tp=tp, backend=backend), Mesh("ranks", ((0, tp),))
    one, every = Axis((0,), 0, None), Axis(tuple(range(tp)), 0, SingleRankGroup(tp) if tp > 1 else None)
    made: Shard = importlib.import_module(backends.package(backend)).build(
        less, layout, mesh, Axes(one, every, one, one, every), device, load=False, trainable=trainable, images=images)
    draw = torch.Generator(device=device).manual_seed(0)
    for name, tensor in made.state_dict().items():
        with torch.no_grad():
            if tensor.dim() > 1:
                tensor.normal_(0.0, 0.02, generator=draw)
            else:
                tensor.fill_(0.0 if name.endswith("bias") else 1.0)
    return made


def random_batch(vocab: int, count: int, prompt: int, response: int, device: torch.device) -> PackedBatch:
    """Sequences of equal lengths, of tokens that end nothing."""
    draw = torch.Generator().manual_seed(count)
    tokens = torch.randint(min(4, vocab - 1), vocab, (count * (prompt + response),), generator=draw)
    full = torch.full((count,), 1, dtype=torch.int64)
    return PackedBatch(torch.arange(count, device=device), (full * prompt).to(device), (full * response).to(device),
                  tokens.to(device))


def measure_calls(model: Model, tp: int, backend: str, sampling: Sampling, device: torch.device,
                  images: bool = False) -> dict[str, dict[str, float]]:
    """Microseconds by pass and feature (`clusters/model.py`). images: also of the vision tower, where the model has
    one."""
    output, vocab = model.head.main, model.sizes.vocab or 64
    measured = GPU if device.type == "cuda" else PROCESSOR
    found: dict[str, list[tuple[dict[str, float], float]]] = {"forward": [], "train": [], "decode": [], "start": []}
    kinds = layer_kinds(model)
    timed = timed_layers(model, tp, device)
    shapes, decodes = (with_each_kind(x, kinds, timed) for x in (measured.shapes, measured.decodes))
    for layers in sorted({s[0] for s in shapes}):
        frozen, trained = (build(model, layers, tp, backend, device, t) for t in (False, True))
        for _, count, length, response in (s for s in shapes if s[0] == layers):
            batch = random_batch(vocab, count, length - response, response, device)
            tokens, outputs = count * length, count if output.level == "seq" else count * response
            once = {"call": 1.0, **layer_features(kinds, layers, 1.0, tokens),
                    "pair": attending_layers(model, layers) * tokens * length, "output": outputs}
            found["forward"].append((once, median_seconds(partial(frozen.infer, [batch], output.name, 1.0), device)))
            for times in (1, 3) if tokens < measured.small else (1,):
                counts = {k: times * n for k, n in once.items()}
                counts |= {"update": 1.0, "element": sum(t.numel() for t in trained.state_dict().values())}
                parts = [(batch,)] * times
                seconds = median_seconds(partial(trained.train, parts, [[output.name]], 1.0, _loss), device)
                found["train"].append((counts, seconds))
        if model.head.generates:
            for _, count, length in (s for s in decodes if s[0] == layers):
                prompts = random_batch(vocab, count, length, 0, device)
                start, later = _decode(frozen, prompts, sampling, device, measured.many)
                steps, width = measured.many - FEW, length + (measured.many + FEW) / 2
                each = steps * count
                found["start"].append(({"call": 1.0, "layer": float(layers)}, start))
                pairs = each * attending_layers(model, layers) * width
                found["decode"].append(({"call": steps, **layer_features(kinds, layers, steps, each), "pair": pairs,
                                         "output": each}, later))
    rates = {name: mean_of_kinds(fit_costs(samples), kinds) for name, samples in found.items() if samples}
    update = {"call": rates["train"].pop("update", 0.0), "element": rates["train"].pop("element", 0.0)}
    costs = {**rates, "update": update}
    if images and model.sizes.towers:
        costs["tower"] = {"image": image_cost(model, tp, backend, measured.images, device)}
    return costs


def image_cost(model: Model, tp: int, backend: str, tokens: int, device: torch.device) -> float:
    """Microseconds that a forward pass of the vision tower takes per token of an image. tokens: to time it with, at
    least."""
    images = GrayImages(model.path)
    shard = build(model, 1, tp, backend, device, False, images)
    count = -(-tokens // images.tokens)
    with_images, without = (median_seconds(partial(
        shard.infer, [images.prompts(count, device, shown)], model.head.main.name, 1.0), device)
        for shown in (True, False))
    return max(with_images - without, 0.0) / (count * images.tokens) * 1e6


def attending_layers(model: Model, layers: int) -> int:
    """How many of the first layers have attention."""
    without = {n for r in model.sizes.recurrences if not r.attends for n in r.layers}
    return layers - len(without & set(range(layers)))


def _loss(_: int, model_outputs: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
    return sum((x.sum() for outputs in model_outputs for x in outputs.values()), torch.zeros(()))


def _decode(shard: Shard, prompts: PackedBatch, sampling: Sampling, device: torch.device,
            most: int) -> tuple[float, float]:
    """Seconds that the tokens up to FEW take beyond those between FEW and `most`, and those that these take."""
    def made(many: int) -> float:
        asked = replace(sampling, max_new_tokens=many, min_new_tokens=many, n=1, stop=())
        return seconds_once(lambda: shard.generate(prompts, asked, seed=1, step=0, max_num_seqs=0), device)

    def between(few: int, many: int) -> float:
        """Timed in turn, so that what changes the machine's speed from moment to moment changes both."""
        return statistics.median([made(many) - made(few) for _ in range(2 + MOST)][2:])

    later = max(between(FEW, most), 1e-9)
    more = between(ONE, FEW) - (FEW - ONE) / (most - FEW) * later
    return max(more, 1e-9), later


def layer_kinds(model: Model) -> tuple[int, ...]:
    """The kind of each layer, numbered as they come. Layers of one kind have parameters of the same shapes and the same
    modules that carry a state."""
    own: dict[int, list[tuple[str, tuple[int, ...]]]] = {}  # of parameters that not every layer has
    for p in (*model.params, *model.base):
        if p.stage == "layer" and p.layer >= 0:
            own.setdefault(p.layer, []).append((p.name.replace(f".{p.layer}.", ".{}.", 1), p.shape))
    states = {n: i for i, r in enumerate(model.sizes.recurrences) for n in r.layers}
    seen: dict[tuple[object, ...], int] = {}
    return tuple([seen.setdefault((states.get(n), *sorted(own.get(n, ()))), len(seen)) for n in range(model.layers)])


def timed_layers(model: Model, tp: int, device: torch.device) -> int:
    """How many layers are built to be timed, besides half as many: two, and of a small model on a processor as many as
    `FILLED_CACHE` bytes of parameters need. Two layers that stay in its caches from pass to pass are faster than the
    layers of a run, which replace each other there."""
    if device.type == "cuda":
        return 2
    own = [p for p in (*model.params, *model.base) if p.stage == "layer" and p.layer <= 0]
    each = sum(prod(p.shape) for p in own) * SIZES[model.dtype] // tp
    return max(2, min(-(-FILLED_CACHE // max(each, 1)), MOST_LAYERS, model.layers))


def with_each_kind(shapes: Sequence[tuple[int, ...]], kinds: Sequence[int], timed: int = 2) -> list[tuple[int, ...]]:
    """Shapes to time; the first number of each is how many of the model's first layers are built, and becomes `timed`
    or half as many. Where layers are of several kinds, each shape is timed with one layer, and once more for each kind:
    with the layers up to the first of this kind behind the first layer. Every such number adds one kind to those that
    smaller numbers have, so a fit can tell their costs apart."""
    if len(set(kinds)) < 2:
        return [(timed if shape[0] > 1 else timed // 2, *shape[1:]) for shape in shapes]
    counts = [1, *sorted({kinds.index(kind, 1) + 1 for kind in kinds[1:]})]
    rest = list(dict.fromkeys(shape[1:] for shape in shapes))
    return [(count, *shape) for count in counts for shape in rest]


def layer_features(kinds: Sequence[int], layers: int, passes: float, tokens: float) -> dict[str, float]:
    """The features of layers: of the first `layers`, by kind."""
    counts = [list(kinds[:layers]).count(kind) for kind in sorted(set(kinds))]
    return {f"layer {k}": passes * n for k, n in enumerate(counts)} | {
        f"token {k}": tokens * n for k, n in enumerate(counts)}


def mean_of_kinds(costs: Mapping[str, float], kinds: Sequence[int]) -> dict[str, float]:
    """Costs of features, with the means over all layers in place of those by kind."""
    found = {name: cost for name, cost in costs.items() if not name.startswith(("layer ", "token "))}
    for name in ("layer", "token"):
        if f"{name} 0" in costs:
            found[name] = sum(costs[f"{name} {kind}"] for kind in kinds) / len(kinds)
    return found


def fit_costs(samples: Iterable[tuple[Mapping[str, float], float]]) -> dict[str, float]:
    """Microseconds for one of each feature, none negative, so that relative errors are small: least squares, without
    the feature that comes out most negative until none does."""
    samples = list(samples)
    names = list(samples[0][0])
    seconds = torch.tensor([s for _, s in samples], dtype=torch.float64)
    table = torch.tensor([[counts[n] for n in names] for counts, _ in samples], dtype=torch.float64) / seconds[:, None]
    scale = table.norm(dim=0).clamp_min(1e-30)
    kept = list(range(len(names)))
    while kept:
        ones = torch.ones(len(seconds), 1, dtype=torch.float64)
        solved = torch.linalg.lstsq(table[:, kept] / scale[kept], ones, driver="gelsd").solution[:, 0]
        if float(solved.min()) >= 0:
            break
        kept.pop(int(solved.argmin()))
    found = dict.fromkeys(names, 0.0)
    for i, value in zip(kept, solved.tolist() if kept else (), strict=True):
        found[names[i]] = float(value / scale[i]) * 1e6 if value > ROUNDING else 0.0
    return found


def training_step(model: Model, tp: int, backend: str, device: torch.device) -> Callable[[], Any]:
    """A small training step, to see how much slower the cores of a machine are together."""
    shard = build(model, 2, tp, backend, device, True)
    batch = random_batch(model.sizes.vocab or 64, 16, 16, 16, device)
    return lambda: shard.train([(batch,)], [[model.head.main.name]], 1.0, _loss)
