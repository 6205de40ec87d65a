"""Compiling at scale: what a user waits for, from the start of the command to its end, from 64 ranks to 10,240.

Runs `rlc compile` and `rlc verify` as separate processes and prints, for each program and size, the CPU seconds of
each from process start to exit (imports, model descriptions, memory estimate and proof included), the size of the plan
and its rank classes; then the gates. Programs: PPO and GRPO on Llama-3 70B shapes, and SFT on a mixture of experts, on
devices of 80 GB, with and without zero 1 to 3, offload, keep=false, ep and vpp; and a program that fits nowhere, whose
refusal names the changes that were tried. Descriptions of models are cached, as they are for a user after the first
compilation; that one is printed, too.

    python -m benchmarks.scale [--most RANKS] [--only WORD]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SIZES = (64, 256, 1024, 4096, 10240)
GATES = {1024: (4.0, 1.0), 10240: (8.0, 3.0)}  # ranks -> most CPU seconds of compile, of verify, for PPO of any layout
GOALS = {1024: 2.0, 10240: 4.0}  # of compile
REFUSAL = 10.0  # most CPU seconds of a refusal, fixes tried
LLAMA = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
         "intermediate_size": 28672, "vocab_size": 128256, "max_position_embeddings": 8192,
         "tie_word_embeddings": False}
# published configurations: Grattafiori et al. 2024, arXiv:2407.21783, table 3; Jiang et al. 2024, arXiv:2401.04088
MIXTRAL = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
           "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
HEADER = """
cluster nodes={nodes} gpus=8 memory_gb=80
data prompts = jsonl("prompts.jsonl", batch={batch}, max_prompt_tokens=1024)
mesh all   = mesh(0:{nodes}, 0:8)
mesh one   = mesh(0:{half}, 0:8)
mesh other = mesh({half}:{nodes}, 0:8)
"""
PPO = "use std.ppo (kl_rewards, gae, ppo_clip, value_clip)\n" + HEADER + """
model actor  = causal_lm("actor", dtype="bfloat16")     train adamw(lr=1e-6)
model critic = value_model("actor", dtype="bfloat16")   train adamw(lr=5e-6)
model ref    = causal_lm("actor", dtype="bfloat16")
model judge  = reward_model("judge", dtype="bfloat16")

flow ppo(steps=1000, seed=1) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, max_new_tokens=1024)  on all tp=8 mbs=16 {keep}
  score  = judge.score(gen)                             on one tp=8 pp=2 mbs=1 {offload}
  ref_lp = ref.logprobs(gen)                            on other tp=8 pp=2 mbs=1 {offload}
  v      = critic.values(gen)                           on one tp=8 pp=2 mbs=1 {keep}
  r        = kl_rewards(score, gen.logprobs, ref_lp, coef=0.1)
  adv, ret = gae(r, v, gamma=1.0, lam=0.95)
  critic.train(gen, loss=value_clip(old=v, ret=ret), minibatches=4)                  on other tp=8 pp=4 mbs=1 {train}
  actor.train(gen, loss=ppo_clip(old=gen.logprobs, adv=whiten(adv)), minibatches=4)  on one tp=8 pp=4 mbs=1 {train}
  every 100 {{ save actor, critic }}
}}
"""
GRPO = "use std.grpo (group_norm, grpo)\n" + HEADER + """
model actor = causal_lm("actor", dtype="bfloat16")  train adamw(lr=1e-6)
model ref   = causal_lm("actor", dtype="bfloat16")
model judge = reward_model("judge", dtype="bfloat16")

flow grpo(steps=1000, seed=1) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=8, max_new_tokens=1024)  on all tp=8 mbs=16 {keep}
  score  = judge.score(gen)                                  on one tp=8 mbs=1 {offload}
  ref_lp = ref.logprobs(gen)                                 on other tp=8 pp=2 mbs=1 {offload}
  adv    = group_norm(score)
  actor.train(gen, loss=grpo(old=gen.logprobs, ref=ref_lp, adv=adv), minibatches=4)  on all tp=8 pp=4 mbs=1 {train}
}}
"""
MOE = "use std.grpo (group_norm, grpo)\n" + HEADER + """
model actor = causal_lm("moe", dtype="bfloat16")  train adamw(lr=1e-6)

flow grpo(steps=1000, seed=1) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=8, max_new_tokens=1024)  on all tp=4 ep=2 mbs=16 {keep}
  adv    = group_norm(len(gen))
  actor.train(gen, loss=grpo(old=gen.logprobs, ref=gen.logprobs, adv=adv), minibatches=4) on all ep=8 pp=4 mbs=1 {train}
}}
"""
SPARE = {"keep": "keep=false", "offload": "offload=true"}
PROGRAMS: dict[str, tuple[str, dict[str, str]]] = {
    "ppo": (PPO, {"keep": "keep=false", "offload": "", "train": "zero=1"}),
    "ppo zero2": (PPO, {**SPARE, "train": "zero=2"}),
    "ppo zero3": (PPO, {**SPARE, "train": "zero=3"}),
    "ppo vpp": (PPO, {**SPARE, "train": "zero=1 vpp=5"}),
    "grpo zero1": (GRPO, {**SPARE, "train": "zero=1"}),
    "moe ep": (MOE, {**SPARE, "train": "zero=2"}),
    "refusal": (PPO.replace("memory_gb=80", "memory_gb=4"), {"keep": "", "offload": "", "train": ""}),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One program at one size. Seconds are of CPU, of a whole process."""

    program: str
    ranks: int
    compile: float
    verify: float
    bytes: int  # of the plan; 0 when it was refused
    classes: int
    said: str  # the first line of a refusal


def directory(folder: Path, family: str, sizes: dict[str, object], head: bool) -> None:
    """A model directory as the compiler reads it: the configuration and the names of the tensors, no weight."""
    from torch import device
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True)
    config = AutoConfig.for_model(family, **sizes, dtype="bfloat16")
    config.save_pretrained(folder)
    with device("meta"):
        names = [name for name, _ in AutoModelForCausalLM.from_config(config).named_parameters()]
    names += ["score.weight"] if head else []
    (folder / "model.safetensors.index.json").write_text(json.dumps(
        {"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}))
    (folder / "tokenizer.json").write_text('{"model": {}}')


def command(folder: Path, *arguments: str) -> tuple[float, int, str]:
    """CPU seconds of `rlc` with these arguments, its exit status and what it said."""
    # an installation has its bytecode, so no command compiles it each time
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "rldsl.cli", *arguments], cwd=folder, capture_output=True, text=True,
                          env=environment | {"XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, done.returncode, done.stdout + done.stderr


def measured(name: str, ranks: int, folder: Path) -> Row:
    text, options = PROGRAMS[name]
    nodes = ranks // 8
    (folder / "p.rlf").write_text(text.format(nodes=nodes, half=nodes // 2, batch=2 * ranks, **options))
    made, status, said = command(folder, "compile", "p.rlf", "-o", "p.plan")
    if status:
        return Row(name, ranks, made, 0.0, 0, 0, said.strip().splitlines()[0])
    proof, status, said = command(folder, "verify", "p.plan")
    if status:
        raise SystemExit(f"{name} at {ranks} ranks: rlc verify refuses the plan\n{said}")
    data = (folder / "p.plan").read_bytes()
    return Row(name, ranks, made, proof, len(data), data.count(b'{"events":['), "")


def line(row: Row) -> str:
    gate, goal = (0.0, 0.0), 0.0
    if row.program == "refusal":
        gate = (REFUSAL, 0.0)
    elif row.program.startswith("ppo"):
        gate, goal = GATES.get(row.ranks, gate), GOALS.get(row.ranks, goal)
    verdict = [f"{what} {seconds:.1f} of {most:.0f} s{f' (goal {aim:.0f})' if aim else ''}"
               f"{'' if seconds <= most else ': MISSED'}"
               for what, seconds, most, aim in (("compile", row.compile, gate[0], goal),
                                                ("verify", row.verify, gate[1], 0.0)) if most]
    return (f"{row.program:<11} {row.ranks:6,} {row.compile:10.2f} {row.verify:9.2f} {row.bytes / 1024:6.0f} KB "
            f"{row.classes:8}  {row.said[:60] or ', '.join(verdict)}"
            + (f"  ({', '.join(verdict)})" if row.said and verdict else ""))


def rows(most: int, only: str, folder: Path) -> Iterator[str]:
    seconds, _, _ = command(folder, "--version")
    yield f"rlc --version: {seconds:.2f} s of CPU"
    yield "program      ranks  compile s  verify s      plan  classes  gates"
    for name in PROGRAMS:
        if only in name:
            for ranks in SIZES:
                if ranks <= most and (name != "refusal" or ranks <= 1024):
                    yield line(measured(name, ranks, folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=SIZES[-1], metavar="RANKS")
    parser.add_argument("--only", default="", metavar="WORD", help="programs whose names contain this")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name, family, sizes, head in (("actor", "llama", LLAMA, False), ("judge", "llama", LLAMA, True),
                                          ("moe", "mixtral", MIXTRAL, False)):
            directory(folder / name, family, sizes, head)
        (folder / "prompts.jsonl").write_text('{"prompt": "x"}\n')
        for text in rows(given.most, given.only, folder):
            print(text, flush=True)


if __name__ == "__main__":
    main()
