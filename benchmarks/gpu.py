"""Everything that needs a GPU to be measured, on one GPU: each number beside its bound.

    python -m benchmarks.gpu [PART ...]           # calibrate decode train loss step match
    python -m benchmarks.gpu --cpu [PART ...]     # the same code at tiny shapes; its numbers say nothing

Bounds come from what this GPU reaches itself: the bandwidth of a large copy and the rate of a large product in
bfloat16. decode: bytes of weights and of the cache that a step must read, over the time of a step. train: the
operations of packed sequences (6 for each parameter and token, and attention's), over the GPU's rate on paper where it
is known. step: a GRPO step against the sum of what its phases need at full rate. Weights are random; shapes are those
of public models. Ends with 0 where every gate is kept, with 1 where one is missed, and with 2 without a GPU.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import loss, match
from rldsl.measure.call_costs import build, random_batch, synchronize
from rldsl.plan.events import Sampling
from rldsl.plan.model import Model
from rldsl.runtime.backend import PackedBatch

# hidden, intermediate, layers, heads, key-value heads, words: Qwen2.5 0.5B, 1.5B and 3B, Llama 3.1 8B
SHAPES = {"0.5B": (896, 4864, 24, 14, 2, 151936), "1.5B": (1536, 8960, 28, 12, 2, 151936),
          "3B": (2048, 11008, 36, 16, 2, 151936), "8B": (4096, 14336, 32, 32, 8, 128256)}
TINY = {"tiny": (32, 64, 2, 4, 2, 46)}
RATES = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense bfloat16, of the SXM boards' data sheets
NO_GPU = "benchmarks.gpu needs a CUDA GPU, and torch sees none here; `--cpu` runs its code at tiny shapes"


@dataclass(frozen=True, slots=True)
class Setup:
    """copy: bytes a second of a large copy, read and written. product: operations a second of a large product. paper:
    the GPU's on its data sheet, or `product`. batches: sequences decoded together. context: tokens of a prompt. new:
    tokens decoded before and after the time that counts. train: models, sequences and tokens of each."""

    device: torch.device
    folder: Path
    shapes: Mapping[str, tuple[int, ...]]
    copy: float
    product: float
    paper: float
    batches: tuple[int, ...] = (1, 64, 256)
    context: int = 1024
    new: tuple[int, int] = (16, 80)
    train: tuple[tuple[str, int, int], ...] = (("1.5B", 16, 1024), ("3B", 8, 1024))
    words: tuple[int, int] = (16384, 151936)
    step: tuple[str, int, int, int] = ("1.5B", 512, 256, 1024)
    match: tuple[str, int, int, int] = ("0.5B", 64, 256, 256)


@dataclass(frozen=True, slots=True)
class Row:
    """gate: the least (of a ratio to a bound) or, with `most`, the largest that will do; None: a report."""

    name: str
    value: float
    unit: str
    gate: float | None = None
    goal: float | None = None
    most: bool = False
    note: str = ""

    @property
    def missed(self) -> bool:
        return self.gate is not None and (self.value > self.gate if self.most else self.value < self.gate)

    def line(self) -> str:
        gate = "" if self.gate is None else f"  gate {self.gate:g} goal {self.goal:g}"
        return f"{self.name:34}{self.value:12.4g} {self.unit:10}{self.note}{gate}{'  MISSED' if self.missed else ''}"


def seconds(work: Callable[[], Any], device: torch.device, times: int = 5) -> float:
    """Median, after one run that does not count."""
    work()
    found = []
    for _ in range(times):
        synchronize(device)
        begin = time.perf_counter()
        work()
        synchronize(device)
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def setup(device: torch.device, folder: Path) -> Setup:
    cuda = device.type == "cuda"
    source = torch.ones(2**30 if cuda else 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / seconds(lambda: target.copy_(source), device)
    size = 8192 if cuda else 256
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = 2 * size**3 / seconds(lambda: a @ b, device)
    if not cuda:
        return Setup(device, folder, TINY, copy, product, product, (1, 3), 8, (2, 6), (("tiny", 4, 16),), (64, 46),
                     ("tiny", 8, 16, 8), ("tiny", 4, 8, 8))
    name = torch.cuda.get_device_name(device)
    paper = next((rate for board, rate in RATES.items() if board in name), product)
    return Setup(device, folder, SHAPES, copy, product, paper)


def model(s: Setup, size: str, dtype: str = "bfloat16") -> Model:
    """Its record, from a directory with a config, a tokenizer and the names of its tensors, which are not read."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from examples.tiny import make_tokenizer
    from rldsl.models.families import describe

    hidden, inner, layers, heads, groups, words = s.shapes[size]
    folder = s.folder / size
    if not folder.is_dir():
        make_tokenizer(folder)
        config = AutoConfig.for_model("llama", hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
                                      num_attention_heads=heads, num_key_value_heads=groups, vocab_size=words,
                                      max_position_embeddings=8192, tie_word_embeddings=False)
        config.save_pretrained(folder)
        with torch.device("meta"):
            names = AutoModelForCausalLM.from_config(config).state_dict()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, "none")}))
    family = describe(str(folder), "causal_lm")
    return Model("m", "causal_lm", str(folder), dtype, family.params, family.layers, family.config_digest)


def weights(s: Setup, size: str) -> int:
    """Parameters that a token meets: all but the table of embeddings."""
    hidden, inner, layers, heads, groups, words = s.shapes[size]
    return layers * hidden * (2 * hidden + 2 * hidden * groups // heads + 3 * inner) + words * hidden


def cache(s: Setup, size: str) -> int:
    """Bytes of keys and values of one token in bfloat16."""
    hidden, _, layers, heads, groups, _ = s.shapes[size]
    return 2 * 2 * layers * groups * (hidden // heads)


def calibrate(s: Setup) -> Iterator[Row]:
    yield Row("copy", s.copy / 1e12, "TB/s")
    yield Row("product, bfloat16", s.product / 1e12, "TFLOP/s", note=f"{s.product / s.paper:.2f} of the data sheet")


def decode(s: Setup) -> Iterator[Row]:
    """Steady decoding: the time of the tokens between two counts."""
    few, many = s.new
    for size in s.shapes:
        record = model(s, size)
        shard = build(record, record.layers, 1, "torch", s.device, False)
        for batch in s.batches:
            given = random_batch(s.shapes[size][-1], batch, s.context, 0, s.device)
            spent = [seconds(lambda: shard.generate(given, Sampling(max_new_tokens=n, min_new_tokens=n), seed=1,
                                                    step=0, max_num_seqs=0), s.device, 3) for n in (few, many)]
            each = max(spent[1] - spent[0], 1e-9) / (many - few)
            read = 2 * weights(s, size) + batch * cache(s, size) * (s.context + (few + many) / 2)
            yield Row(f"decode {size} B={batch}", read / s.copy / each, "of bound", 0.60 if batch == 1 else 0.70, 0.85,
                      note=f"{batch / each:.0f} tokens/s")
        del shard


def train(s: Setup) -> Iterator[Row]:
    """Forward and backward of packed sequences, and the optimizer's step."""
    for size, count, length in s.train:
        record = model(s, size)
        hidden, layers = s.shapes[size][0], s.shapes[size][2]
        shard = build(record, record.layers, 1, "torch", s.device, True)
        batch = random_batch(s.shapes[size][-1], count, length // 4, length - length // 4, s.device)
        spent = seconds(lambda: shard.train([(batch,)], [["logprobs"]], 1.0, _loss), s.device, 3)
        tokens = count * length
        work = 6 * weights(s, size) * tokens + 6 * layers * tokens * length * hidden  # causal: half of all pairs
        yield Row(f"train {size} packed", work / spent / s.paper, "MFU", 0.45, 0.58,
                  note=f"{tokens / spent:.0f} tokens/s, {work / spent / s.product:.2f} of its own product")
        del shard


def _loss(_: int, fresh: Any) -> torch.Tensor:
    return sum(x.mean() for outputs in fresh for x in outputs.values())


def head(s: Setup) -> Iterator[Row]:
    """The loss head in bfloat16 against full logits."""
    tokens, words = s.words
    given = loss.given(tokens, words, s.shapes[next(iter(s.shapes))][0], s.device, torch.bfloat16)
    mine, other = (loss.peak(f, *given, False) for f in (loss.ours, loss.theirs))
    yield Row("loss memory", mine / (4 * tokens * words), "of logits", 0.15, 0.03, True,
              f"full logits {other / (4 * tokens * words):.2f}")
    spent = [seconds(lambda: f(*given, False).backward(), s.device) for f in (loss.ours, loss.theirs)]
    yield Row("loss time", spent[0] / spent[1], "of full", 1.05, 0.95, True)


def step(s: Setup) -> Iterator[Row]:
    """Generation, and one update on what it made; rewards cost nothing here."""
    size, count, prompt, response = s.step
    record = model(s, size)
    shard = build(record, record.layers, 1, "torch", s.device, True)
    given = random_batch(s.shapes[size][-1], count, prompt, 0, s.device)
    asked, part = Sampling(max_new_tokens=response), max(1, 16384 // (prompt + response))

    def work() -> None:
        made = shard.generate(given, asked, seed=1, step=0, max_num_seqs=0).batch
        lens = (made.prompt_lens + made.response_lens).tolist()
        pieces = [[tensor[i : i + part] for tensor in (made.rows, made.prompt_lens, made.response_lens)]
                  for i in range(0, count, part)]
        tokens = made.tokens.split([sum(lens[i : i + part]) for i in range(0, count, part)])
        shard.train([(PackedBatch(*some, t),) for some, t in zip(pieces, tokens)], [["logprobs"]], 1.0, _loss)

    spent = seconds(work, s.device, 1)
    total = count * (prompt + response)
    read = response * (2 * weights(s, size) + count * cache(s, size) * (prompt + response / 2))
    least = read / s.copy + (2 + 6) * weights(s, size) * total / s.paper  # each token generated once, trained on once
    yield Row(f"step {size}", least / spent, "of bound", 0.40, 0.55, note=f"{total / spent:.0f} tokens/s")


def logprobs(s: Setup) -> Iterator[Row]:
    """Generation against training, the same parameters."""
    size, count, longest, new = s.match
    for dtype in ("float32", "bfloat16"):
        record = model(s, size, dtype)
        shard = build(record, record.layers, 1, "torch", s.device, False)
        found = match.gap(shard, match.prompts(s.shapes[size][-1], count, longest, s.device),
                          Sampling(max_new_tokens=new))
        if dtype == "float32":
            yield Row("log-probs float32, most", found.most, "nats", match.FLOAT_GATE, 0.0, True)
            continue
        yield Row("log-probs bfloat16, mean", found.mean, "nats", match.MEAN_GATE, 0.0, True, f"most {found.most:.2g}")
        yield Row("log-probs bfloat16, p99.9", found.tail, "nats", match.TAIL_GATE, 0.0, True)


PARTS: Mapping[str, Callable[[Setup], Iterator[Row]]] = {
    "calibrate": calibrate, "decode": decode, "train": train, "loss": head, "step": step, "match": logprobs}


def measured(device: torch.device, parts: list[str]) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as place:
        s = setup(device, Path(place))
        for name in parts:
            yield from PARTS[name](s)


def main(arguments: list[str]) -> int:
    if {"-h", "--help"} & {*arguments}:
        print(__doc__)
        return 0
    cpu = "--cpu" in arguments
    parts = [a for a in arguments if a != "--cpu"] or list(PARTS)
    if unknown := [p for p in parts if p not in PARTS]:
        print(f"there is no part {unknown[0]!r}; parts: {' '.join(PARTS)}", file=sys.stderr)
        return 2
    if not cpu and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    device = torch.device("cpu") if cpu else torch.device("cuda", 0)
    print("shapes are tiny and this is a processor: the numbers say nothing" if cpu else
          torch.cuda.get_device_name(device), flush=True)
    missed = 0
    for row in measured(device, parts):
        print(row.line(), flush=True)
        missed += row.missed
    return int(missed > 0 and not cpu)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
