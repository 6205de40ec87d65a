"""How far log-probs of generation are from those of training, on the same parameters and samples.

    python -m benchmarks.match [FAMILY ...]

Each token is sampled by decoding with a cache, a token at a time; then its log-prob is taken again by the packed pass
that inference and training make. Both run the family's own code here, so what is left is the order in which sums are
taken: rows of a product beside others, keys in other blocks. Mean, 99.9th percentile and largest absolute difference.
Gates: 1e-5 at most in float32; 0 with `invariant=true`, with the CPU time of both passes over that without it; a mean
of 5e-3 and a 99.9th percentile of 0.1 in bfloat16.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rldsl.plan.events import Sampling
from rldsl.runtime.backend import PackedBatch, Shard

FAMILIES = ("qwen3", "llama", "gemma", "mistral", "gpt2", "granite", "qwen2", "phi3")
SIZES = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
             max_position_embeddings=512)
FLOAT_GATE, MEAN_GATE, TAIL_GATE = 1e-5, 5e-3, 0.1


@dataclass(frozen=True, slots=True)
class Gap:
    """Absolute differences of log-probs (nats) over so many tokens."""

    tokens: int
    mean: float
    tail: float
    most: float

    @staticmethod
    def of(a: torch.Tensor, b: torch.Tensor) -> Gap:
        gaps = (a.double() - b.double()).abs()
        return Gap(gaps.numel(), gaps.mean().item(), gaps.quantile(0.999).item(), gaps.max().item())


def gap(shard: Shard, prompts: PackedBatch, sampling: Sampling, limit: int = 0) -> Gap:
    """Between `generate` and `infer` of one shard. limit: sequences decoded together (0: all)."""
    made = shard.generate(prompts, sampling, seed=1, step=0, max_num_seqs=limit)
    again = shard.infer([made.batch], "logprobs", sampling.temperature)
    return Gap.of(made.logprobs, again)


def prompts(vocab: int, count: int, longest: int, device: torch.device) -> PackedBatch:
    """Of 1 to `longest` tokens."""
    draw = torch.Generator().manual_seed(0)
    lens = torch.randint(1, longest + 1, (count,), generator=draw)
    tokens = torch.randint(2, vocab, (int(lens.sum()),), generator=draw)
    return PackedBatch(torch.arange(count, device=device), lens.to(device), torch.zeros_like(lens).to(device),
                  tokens.to(device))


def main(families: list[str]) -> int:
    """The number of gates that are missed."""
    from tests.backend_torch.shards import make_shard, plan_model
    from tests.tiny import make_model

    torch.set_num_threads(1)
    missed, prices = 0, []
    print(f"{'family':<10}{'mode':<11}{'tokens':>6}{'mean':>11}{'p99.9':>11}{'most':>11}{'time':>7}", flush=True)
    with tempfile.TemporaryDirectory() as place:
        for family in families or FAMILIES:
            more = dict(n_embd=256, n_layer=4, n_head=8, n_positions=512) if family == "gpt2" else SIZES
            more = more | (dict(head_dim=32) if family in ("qwen3", "gemma") else {})
            path = str(make_model(Path(place) / family, family=family, scale=0.05, **more))
            spent: dict[str, float] = {}
            for mode, dtype in (("float32", "float32"), ("invariant", "float32"), ("bfloat16", "bfloat16")):
                shard = make_shard(replace(plan_model(path, dtype=dtype), invariant=mode == "invariant"), 0)
                for _ in range(2):  # the first also records
                    begin = time.process_time()
                    found = gap(shard, prompts(46, 32, 24, torch.device("cpu")), Sampling(max_new_tokens=48), 20)
                    spent[mode] = time.process_time() - begin
                good = (found.mean <= MEAN_GATE and found.tail <= TAIL_GATE if mode == "bfloat16"
                        else found.most <= (0 if mode == "invariant" else FLOAT_GATE))
                missed += not good
                price = spent[mode] / spent["float32"]
                prices += [price] if mode == "invariant" else []
                print(f"{family:<10}{mode:<11}{found.tokens:6}{found.mean:11.2e}{found.tail:11.2e}{found.most:11.2e}"
                      f"{price:7.2f}{'' if good else '  MISSED'}", flush=True)
    print(f"gates: float32 most {FLOAT_GATE:g}, invariant 0; bfloat16 mean {MEAN_GATE:g}, p99.9 {TAIL_GATE:g}; "
          f"{missed} missed. price of invariant: {statistics.median(prices):.2f} of the time, median", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
