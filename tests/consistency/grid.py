"""One digest everywhere: a program that generates, takes log-probs and trains, under many placements.

    python -m tests.consistency.grid [--steps 4] [--families dense,odd,moe] [--dtypes float32,bfloat16] [--only WORDS]
                                   [--every K]

For each family and dtype the first run is on one rank. Each other run must have its tokens, log-probs, metrics and final
parameters, bit for bit, a difference of 0 between the log-probs of generation and those of inference, and no token whose
experts differ between generation, inference and training. Prints a line for each run; the exit status is 1 if one
differs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from rldsl.backends.torch.model import install_parameters
from rldsl.backends.torch.model.attention import VarlenAttention
from rldsl.backends.torch.shard import TorchShard
from rldsl.runtime.draws import uniform
from tests.end_to_end.programs import compile_program
from tests.end_to_end.test_invariance import HERE, placement
from tests.tiny import make_model, make_sums, write_jsonl
from tests.world import run_world

FAMILIES: dict[str, dict[str, Any]] = {
    "dense": dict(family="qwen3", tie_word_embeddings=True, num_hidden_layers=2),
    # three query heads for each key; with tp=4 two ranks share a key head
    "odd": dict(family="qwen2", num_attention_heads=12, num_key_value_heads=2, hidden_size=96, intermediate_size=90,
                num_hidden_layers=2),
    "moe": dict(family="qwen3_moe", num_experts=8, num_hidden_layers=2),
}
DTYPES = ("float32", "bfloat16")

PROGRAM = """
use std.grpo (group_norm, grpo)
use py "rewards_small.py" (digits: gen -> seq)

param base = "base"
param rows = "rows.jsonl"
param steps = 4

data prompts = jsonl(rows, batch=2, max_prompt_tokens=16)
model actor = causal_lm(base, dtype={dtype}, invariant=training) train adamw(lr=1e-3, clip_grad=0.5)
model ref   = causal_lm(base, dtype={dtype}, invariant=true)

flow grid(steps=steps, seed=7) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=3, max_new_tokens=5, temperature=0.9)
  again  = actor.logprobs(gen)
  ref_lp = ref.logprobs(gen)
  reward = digits(gen)
  metric reward = mean(reward)
  metric gap    = max(abs(gen.logprobs - again))
  actor.train(gen, loss=grpo(old=gen.logprobs, adv=group_norm(reward), ref=ref_lp, beta=0.05))
  every {steps} {{ save actor }}
}}
"""

# of `actor.train`; the other calls get placements in turn
DENSE = (
    "", "dp=2", "dp=4", "tp=2", "tp=4", "pp=2", "cp=2", "dp=2 tp=2", "dp=2 pp=2", "dp=2 cp=2", "tp=2 pp=2", "tp=2 cp=2",
    "pp=2 cp=2", "dp=2 zero=1", "dp=2 zero=2", "dp=2 zero=3", "dp=4 zero=1", "dp=4 zero=3", "dp=2 tp=2 zero=1",
    "dp=2 tp=2 zero=2", "dp=2 tp=2 zero=3", "dp=2 pp=2 zero=2", "dp=2 cp=2 zero=1", "dp=2 cp=2 zero=3",
    "tp=2 pp=2 cp=2", "dp=2 tp=2 pp=2 zero=2", "dp=2 recompute=full", "tp=2 cp=2 recompute=full")
EXPERTS = (
    "dp=2 ep=2", "dp=2 ep=2 zero=1", "dp=2 ep=2 zero=3", "dp=2 ep=2 tp=2", "dp=2 ep=2 pp=2", "dp=4 ep=2",
    "dp=4 ep=2 zero=2", "dp=4 ep=4")
CALLS = ("generate", "infer", "train")  # of the actor, in which experts are chosen
ENDS = "ends"  # in place of a call: what inference computes of the last token of each row, which generation does not
GENERATE = ("dp=2", "tp=2", "pp=2", "dp=2 tp=2", "tp=4", "dp=2 pp=2", "dp=4")
INFER = ("tp=2", "dp=2", "cp=2", "dp=2 tp=2", "pp=2", "tp=4")


class Found(NamedTuple):
    """Digests of a run."""

    tokens: str
    logprobs: str
    parameters: str
    gap: float  # the largest difference between the log-probs of generation and of inference
    moved: float  # the share of tokens that other experts, or other hidden states, reach in one of the calls
    metrics: str
    experts: frozenset[bytes]  # what all calls compute of tokens, with their experts, as one rank has it

    @property
    def exact(self) -> bool:
        return self.gap == self.moved == 0


def degree(words: str) -> int:
    """The ranks of a layout."""
    sizes = [int(word.partition("=")[2]) for word in words.split() if word.split("=")[0] in ("dp", "tp", "pp", "cp")]
    total = 1
    for size in sizes:
        total *= size
    return total


def placements(family: str) -> list[tuple[str, str]]:
    """(name, placement file)"""
    found = []
    for i, train in enumerate(DENSE + (EXPERTS if family == "moe" else ())):
        generate, infer = ("", "") if i == 0 else (GENERATE[i % len(GENERATE)], INFER[i % len(INFER)])
        if "ep" in train:
            generate = " ".join(word for word in train.split() if "zero" not in word)
        ranks = max(map(degree, (train, generate, infer)))
        where = {name: f"on mesh(0:{degree(words)}) {words}" for name, words in
                 (("actor_train", train), ("actor_generate", generate), ("actor_logprobs", infer), ("ref_*", infer))}
        found.append((train or "one rank", placement(ranks, **where)))
    return found


Routed = dict[str, set[bytes]]  # call, or `ENDS` -> a token's hidden state in a layer, and its experts in their order


def recorded_rank(rank: int, data: bytes, out: str, cwd: str) -> tuple[Any, Any, Any, Routed]:
    """Run a rank; its random numbers, the tokens that they took, their log-probs, and the experts of all tokens."""
    from rldsl.runtime.interpreter.interpreter import execute
    from rldsl.runtime.interpreter.options import Options
    from rldsl.runtime.plan_file import PlanFile

    found: list[tuple[torch.Tensor, ...]] = []
    real = TorchShard.generate
    routed: Routed = {name: set() for name in (*CALLS, ENDS)}
    calls, lengths = ["none"], [torch.empty(0, dtype=torch.long)]
    for name in CALLS:
        setattr(TorchShard, name, within(getattr(TorchShard, name), name, calls))
    install_parameters.parallelize_experts = partial(recorded_experts, install_parameters.parallelize_experts, routed,
                                                     calls, lengths)
    packed = VarlenAttention.__init__

    def noted(self: VarlenAttention, of: torch.Tensor, *more: Any) -> None:
        packed(self, of, *more)
        lengths.append(of)

    VarlenAttention.__init__ = noted  # type: ignore[method-assign]

    def generate(self: Any, *args: Any, seed: int, step: int, **more: Any) -> Any:
        made = within(real, "generate", calls)(self, *args, seed=seed, step=step, **more)
        batch = made.batch
        if not len(batch):  # more ranks than prompts
            return made
        lens = batch.prompt_lens + batch.response_lens
        starts = lens.cumsum(0) - lens + batch.prompt_lens
        draws = [uniform(seed, step, row, torch.arange(n))
                 for row, n in zip(batch.rows.cpu(), batch.response_lens.tolist())]
        tokens = [batch.tokens[a : a + n].cpu() for a, n in zip(starts.tolist(), batch.response_lens.tolist())]
        found.append((torch.cat(draws), torch.cat(tokens), made.logprobs.cpu()))
        return made

    os.chdir(cwd)
    TorchShard.generate = generate  # type: ignore[method-assign]
    execute(PlanFile.from_bytes(data, "grid.plan"), out, options=Options(allow_write=(str(Path(out).parents[1]),)))
    empty = torch.empty(0)
    draws, tokens, logprobs = (torch.cat(x) for x in zip(*found)) if found else (empty, empty.long(), empty)
    # arrays: a tensor would need this process when it is read
    return draws.numpy(), tokens.numpy(), logprobs.numpy(), routed


def within(function: Callable[..., Any], name: str, calls: list[str]) -> Callable[..., Any]:
    """A function while which a name is the last one of `calls`, if a shard of the actor runs it."""
    def run(shard: Any, *args: Any, **options: Any) -> Any:
        calls.append(name if shard.model.name == "actor" else "none")
        try:
            return function(shard, *args, **options)
        finally:
            calls.pop()

    return run


def recorded_experts(real: Callable[..., None], routed: Routed, calls: list[str], lengths: list[torch.Tensor],
                     module: Any, *args: Any, **options: Any) -> None:
    """`parallelize_experts`, whose forward also records. lengths: the last are those of the sequences that run."""
    real(module, *args, **options)
    compute = module.forward

    def forward(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        states = hidden.detach().contiguous().view(torch.uint8).cpu().numpy()
        found = [sha256(state.tobytes() + experts.tobytes()).digest()
                 for state, experts in zip(states, chosen.cpu().numpy(), strict=True)]
        if calls[-1] in routed:
            routed[calls[-1]].update(found)
        if calls[-1] == "infer" and int(lengths[-1].sum()) == len(found):
            routed[ENDS].update(found[end - 1] for end in lengths[-1].cumsum(0).tolist())
        out: torch.Tensor = compute(hidden, chosen, weights)
        return out

    module.forward = forward


def moved_tokens(ranks: Sequence[Routed], right: frozenset[bytes]) -> float:
    """The share of `right` that generation, inference or training computes with other experts. What generation computes
    besides, of rows that have ended while others go on, counts nowhere."""
    computed = [set().union(*(r[name] for r in ranks)) for name in CALLS]
    return 1 - len(right.intersection(*computed)) / len(right) if right else 0.0


def tokens_of_one_rank(routed: Routed) -> frozenset[bytes]:
    """What all three calls compute: the tokens of inference, without the last one of each row."""
    return frozenset(routed["infer"] - routed[ENDS])


def run(folder: Path, model: Path, dtype: str, place: str, steps: int, invariant: bool = True,
        right: Found | None = None) -> Found:
    """invariant: with what the program asks for; else without. right: of one rank; None: this run is."""
    import json

    folder.mkdir(parents=True)
    (folder / "rewards_small.py").write_text((HERE / "rewards_small.py").read_text())
    write_jsonl(folder / "rows.jsonl", make_sums(64))
    text = PROGRAM.format(dtype=dtype, steps=steps)
    if not invariant:
        text = text.replace(", invariant=training", "").replace(", invariant=true", "")
    (folder / "grid.rlf").write_text(text)
    sets = {"base": str(model), "rows": str(folder / "rows.jsonl"), "steps": steps}
    data = compile_program(folder / "grid.rlf", sets, place, folder)
    world = json.loads(data.splitlines()[0])["world"]
    ranks = run_world(world, recorded_rank, data, str(folder / "out"), os.getcwd(), timeout=1800.0)
    draws, tokens, logprobs = (torch.cat([torch.from_numpy(x) for x in parts])
                               for parts in zip(*(rank[:3] for rank in ranks)))
    order = {draw: i for i, draw in enumerate(draws.tolist())}  # ranks of a shard have the same
    at = torch.tensor([order[draw] for draw in sorted(order)])
    saved = {f"{file.parent.name} {name}": x for file in sorted(folder.rglob("*.safetensors"))
             for name, x in load_file(file).items()}
    assert saved and len(at)
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    kept = [[line[name] for name in ("reward", "gap", "actor/loss", "actor/grad_norm")] for line in lines]
    routed = [rank[3] for rank in ranks]
    experts = tokens_of_one_rank(routed[0]) if right is None else right.experts
    return Found(digest(tokens[at]), digest(logprobs[at]), digest(*(saved[name] for name in sorted(saved))),
                 max(line["gap"] for line in lines), moved_tokens(routed, experts),
                 sha256(repr(kept).encode()).hexdigest()[:16], experts)


def digest(*tensors: torch.Tensor) -> str:
    data = b"".join(x.contiguous().view(torch.uint8).numpy().tobytes() for x in tensors)
    return sha256(data).hexdigest()[:16]


def main(words: list[str]) -> int:
    """The number of runs that differ."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--only", default="", help="placements whose degrees contain this")
    parser.add_argument("--every", type=int, default=1, help="take only one of so many placements")
    given = parser.parse_args(words)
    wrong = runs = 0
    with tempfile.TemporaryDirectory() as place:
        for family in given.families.split(","):
            model = make_model(Path(place) / family, **FAMILIES[family])
            for dtype in given.dtypes.split(","):
                right: Found | None = None
                for i, (name, text) in enumerate(placements(family)):
                    if i and (given.only not in name or i % given.every):
                        continue
                    begin = time.time()
                    found = run(Path(place) / f"{family}-{dtype}-{i}", model, dtype, text, given.steps, right=right)
                    assert found.experts or family != "moe"
                    right = right or found
                    good = found == right and found.exact
                    wrong, runs = wrong + (not good), runs + 1
                    print(f"{family:<7}{dtype:<9} {name:<28}{' '.join(found[:3])} gap {found.gap:g} experts "
                          f"{found.moved:g} {time.time() - begin:5.0f} s{'' if good else '  DIFFERS'}", flush=True)
    print(f"{runs} runs, {wrong} differ", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
