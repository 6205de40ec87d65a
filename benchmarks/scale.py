"""Compiling at scale: PPO and GRPO on Llama-3 70B and 405B shapes, from 64 ranks to 10,240.

Prints for each size the CPU seconds to read and place the program (model configurations included), to compile it (proof
included) and of the proof alone, the size of the plan, its classes and the most process groups that one rank is in;
then how each grows with the ranks (exponent 1: in proportion; 0: not at all), beside the gates of docs/design.md §10.

    python -m benchmarks.scale [most ranks]
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rldsl import api
from rldsl.passes.pipeline import run
from rldsl.placement.place import place_graph
from rldsl.plan.codec import encode
from rldsl.plan.model import Plan
from rldsl.verify import verify

SIZES = (64, 256, 1024, 4096, 10240)
LLAMA = {  # the published configurations (Grattafiori et al. 2024, arXiv:2407.21783, table 3)
    "70B": dict(hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, intermediate_size=28672),
    "405B": dict(hidden_size=16384, num_hidden_layers=126, num_attention_heads=128, intermediate_size=53248),
}
HEADER = """
param base = "actor"
param judge_path = "judge"
cluster nodes={nodes} gpus=8 memory_gb=4000  # what fits is another question; this one is about time
data prompts = jsonl("prompts.jsonl", batch={batch}, max_prompt_tokens=1024)
mesh all   = mesh(0:{nodes}, 0:8)
mesh one   = mesh(0:{half}, 0:8)
mesh other = mesh({half}:{nodes}, 0:8)
"""
PPO = "use std.ppo (kl_rewards, gae, ppo_clip, value_clip)\n" + HEADER + """
model actor  = causal_lm(base, dtype="bfloat16")        train adamw(lr=1e-6)
model critic = value_model(base, dtype="bfloat16")      train adamw(lr=5e-6)
model ref    = causal_lm(base, dtype="bfloat16")
model judge  = reward_model(judge_path, dtype="bfloat16")

flow ppo(steps=1000, seed=1) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, max_new_tokens=1024)  on all tp=8
  score  = judge.score(gen)                             on one tp=8 pp=2
  ref_lp = ref.logprobs(gen)                            on other tp=8 pp=2
  v      = critic.values(gen)                           on one tp=8 pp=2
  r        = kl_rewards(score, gen.logprobs, ref_lp, coef=0.1)
  adv, ret = gae(r, v, gamma=1.0, lam=0.95)
  critic.train(gen, loss=value_clip(old=v, ret=ret), minibatches=4)                  on other tp=8 pp=2 mbs=1
  actor.train(gen, loss=ppo_clip(old=gen.logprobs, adv=whiten(adv)), minibatches=4)  on one tp=8 pp=4 mbs=1
  every 100 {{ save actor, critic }}
}}
"""
GRPO = "use std.grpo (group_norm, grpo)\n" + HEADER + """
model actor = causal_lm(base, dtype="bfloat16")  train adamw(lr=1e-6)
model ref   = causal_lm(base, dtype="bfloat16")
model judge = reward_model(judge_path, dtype="bfloat16")

flow grpo(steps=1000, seed=1) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=8, max_new_tokens=1024)  on all tp=8
  score  = judge.score(gen)                                  on one tp=8
  ref_lp = ref.logprobs(gen)                                 on other tp=8 pp=2
  adv    = group_norm(score)
  actor.train(gen, loss=grpo(old=gen.logprobs, ref=ref_lp, adv=adv), minibatches=4)  on all tp=8 pp=4 mbs=1
}}
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One program at one size. Seconds are of CPU. groups: the most process groups that one rank is in."""

    ranks: int
    read: float
    compile: float
    verify: float
    bytes: int
    events: int
    classes: int
    groups: int


def directory(folder: Path, sizes: dict[str, int], head: bool) -> None:
    """A model directory as the compiler reads it: the configuration and the names of the tensors, no weight."""
    from torch import device
    from transformers import AutoModelForCausalLM, LlamaConfig

    folder.mkdir(parents=True)
    config = LlamaConfig(**sizes, num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192,
                         tie_word_embeddings=False, dtype="bfloat16")
    config.save_pretrained(folder)
    with device("meta"):
        names = [name for name, _ in AutoModelForCausalLM.from_config(config).named_parameters()]
    names += ["score.weight"] if head else []
    (folder / "model.safetensors.index.json").write_text(json.dumps(
        {"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}))
    (folder / "tokenizer.json").write_text('{"model": {}}')


def cpu(work: Callable[[], object]) -> tuple[float, object]:
    begin = time.process_time()
    found = work()
    return time.process_time() - begin, found


def groups(plan: Plan) -> int:
    """The most process groups that one rank is in."""
    meshes = {m.id: m for m in plan.meshes}
    layouts = {x.id: x.mesh for x in plan.layouts}
    inside = [meshes[g.mesh or layouts[g.layout]] for g in plan.groups]
    return max(sum(any(a <= c.ranks[0][0] < b for a, b in m.ranks) for m in inside) for c in plan.classes)


def measured(text: str, ranks: int, folder: Path) -> Row:
    nodes = ranks // 8
    program = folder / f"scale{ranks}.rlf"
    program.write_text(text.format(nodes=nodes, half=nodes // 2, batch=4 * ranks))
    sets = {"base": str(folder / "actor"), "judge_path": str(folder / "judge")}
    read, placed = cpu(lambda: place_graph(api.build_graph(api.read_source(str(program)), sets), ""))
    seconds, made = cpu(lambda: api.finish(run(placed)).plan)
    proof, _ = cpu(lambda: verify(made))
    size = len(encode(made))
    return Row(ranks, read, seconds, proof, size, sum(len(c.events) for c in made.classes[:1]),
               len(made.classes), groups(made))


def exponent(rows: list[Row], of: Callable[[Row], float]) -> float:
    """Least squares of log value over log ranks."""
    xs = [math.log(r.ranks) for r in rows]
    ys = [math.log(of(r)) for r in rows]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys)) / sum((a - x) ** 2 for a in xs)


def table(name: str, rows: list[Row]) -> Iterator[str]:
    yield f"\n{name}\n  ranks   read s  compile s  verify s      plan  classes  groups of a rank"
    for r in rows:
        yield (f"{r.ranks:7,} {r.read:8.2f} {r.compile:10.2f} {r.verify:9.3f} {r.bytes / 1024:6.0f} KB {r.classes:8} "
               f"{r.groups:17}")
    if len(rows) > 1:
        yield (f"  grows as ranks to the power of: compile {exponent(rows, lambda r: r.compile):.2f}, verify "
               f"{exponent(rows, lambda r: r.verify):.2f}, plan {exponent(rows, lambda r: r.bytes):.2f}")
    at = {r.ranks: r for r in rows}
    if 1024 in at:
        r = at[1024]
        yield (f"  at 1,024 ranks: compile / gate (5 s): {r.compile / 5:.2f}, / goal (1 s): {r.compile:.2f};"
               f" plan / gate (1 MB): {r.bytes / 2**20:.2f}, / goal (128 KB): "
               f"{r.bytes / 2**17:.2f}")
    if 1024 in at and 10240 in at:
        yield f"  10,240 against 1,024 ranks (goal 2): {at[10240].compile / at[1024].compile:.2f} times the CPU time"


def main() -> None:
    most = int(sys.argv[1]) if len(sys.argv) > 1 else SIZES[-1]
    for model, sizes in LLAMA.items():
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            for name, head in (("actor", False), ("judge", True)):
                directory(folder / name, sizes, head)
            for name, text in (("PPO", PPO), ("GRPO", GRPO)):
                measured(text, SIZES[0], folder)  # imports and caches
                rows = [measured(text, n, folder) for n in SIZES if n <= most]
                print("\n".join(table(f"{name}, Llama-3 {model}", rows)), flush=True)


if __name__ == "__main__":
    main()
