"""Runs of whole programs on the device of `device_guard.py`, and what crossed its border."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cuda_paths.device_guard import DEVICE, Border, frames, guarded
from tests.end_to_end.programs import compile_program
from tests.environments.programs import HERE as ENVIRONMENTS
from tests.moe.shards import make
from tests.tiny import make_all, write_jsonl
from tests.world import run_world

# where the host must keep ahead of the device: function -> what is said of it
REGIONS = {"pipeline_forward_backward": "passes", "CapturedSteps.__call__": "decode steps"}

HEAD = """
use std.ppo (gae, ppo_clip, value_clip, kl_rewards)
use std.grpo (group_norm)

data prompts = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=16)
loss pg(logprobs: token; adv: seq) { return -mean(adv * logprobs) }
"""
PPO = HEAD + """
model actor = causal_lm("models/sft", dtype="bfloat16") train adamw(lr=1e-3)
model critic = value_model("models/sft"CRITIC) train adamw(lr=1e-3)
model ref = causal_lm("models/sft", dtype="bfloat16")

flow ppo(steps=1, seed=1) {
  prompt = prompts.next()
  gen = actor.generate(prompt, n=2, max_new_tokens=6, top_p=0.9)
  v = critic.values(gen)
  ref_lp = ref.logprobs(gen)
  r = kl_rewards(len(gen) / 8.0, gen.logprobs, ref_lp, coef=0.1)
  adv, ret = gae(r, v, gamma=1.0, lam=0.95)
  critic.train(gen, loss=value_clip(old=v, ret=ret), minibatches=2)
  actor.train(gen, loss=ppo_clip(old=gen.logprobs, adv=whiten(adv)), minibatches=2)
  metric kl = mean(gen.logprobs - ref_lp)
  ema ref from actor 0.9
  checkpoint every 1
  save actor
}
"""
BF16 = ', dtype="bfloat16"'
GRPO = HEAD + """
model actor = causal_lm("MODEL", dtype="bfloat16"MORE) train adamw(lr=1e-3, clip_grad=1.0)

flow f(steps=1, seed=1) {
  prompt = prompts.next()
  gen = actor.generate(prompt, n=2, max_new_tokens=6, greedy=GREEDY)
  adv = group_norm(len(gen) / 8.0)
  actor.train(gen, loss=pg(adv=adv), minibatches=2)
  metric longest = max(len(gen))
}
"""
TALK = f"""
use py "{ENVIRONMENTS / 'envs_scripted.py'}" (Guess: env)
""" + HEAD.replace("prompts.jsonl", "numbers.jsonl") + """
model actor = causal_lm("models/sft", dtype="bfloat16") train adamw(lr=1e-3)

flow f(steps=1, seed=1) {
  prompt = prompts.next()
  gen = actor.generate(prompt, env=Guess, n=2, max_turns=3, max_new_tokens=6, max_tokens=64)
  adv = group_norm(gen.reward)
  actor.train(gen, loss=pg(adv=adv), minibatches=2)
}
"""


@dataclass(frozen=True)
class Case:
    """A program, and where it runs."""

    source: str
    place: str
    ranks: int


CASES = {
    # half precision beside float32, graphs of decoding, a checkpoint
    "one rank": Case(PPO.replace("CRITIC", ""), "", 1),
    # rows and parameters move between ranks; tensor and pipeline parallel; offloaded
    "moves": Case(PPO.replace("CRITIC", BF16), """
place actor.generate on mesh(0:2) dp=2
place actor.train on mesh(2:4) pp=2 mbs=2 offload=true
place critic.values on mesh(0:1)
place critic.train on mesh(1:3) tp=2
place ref.logprobs on mesh(2:4) dp=2 offload=true""", 4),
    # sharded parameters, recomputed activations, context parallel, two stages of a pipeline on each rank
    "shards": Case(PPO.replace("CRITIC", BF16), """
place actor.generate on mesh(0:4) dp=2 tp=2
place actor.train on mesh(0:4) dp=4 zero=3 recompute=full
place critic.values on mesh(0:2) cp=2
place critic.train on mesh(2:4) pp=2 vpp=2 mbs=1
place ref.logprobs on mesh(0:4) dp=2 pp=2""", 4),
    "experts": Case(GRPO.replace("MODEL", "models/moe").replace("MORE", "").replace("GREEDY", "false"),
                    "place actor.* on mesh(0:2) dp=2 ep=2", 2),
    "adapter": Case(GRPO.replace("MODEL", "models/sft").replace("MORE", ", lora(r=2)").replace("GREEDY", "true"),
                    "", 1),
    "conversations": Case(TALK, "", 1),
}


@dataclass(frozen=True)
class Found:
    """What one rank did."""

    crossings: Counter[tuple[str, Border]]  # (region or "", crossing) -> how often
    sites: frozenset[tuple[str, str, int]]  # lines that make a tensor on the device
    graphs: int
    replays: int
    seconds: float  # of the processor


def prepare(folder: Path) -> Path:
    """The models and data of all programs."""
    home = make_all(folder)
    make(home / "models/moe", "qwen3_moe")
    write_jsonl(home / "data/numbers.jsonl", [{"prompt": f"{i} + {i} =", "number": i} for i in range(8)])
    return home


def run(case: Case, folder: Path, resume: bool = False, forgotten: tuple[str, str, int] | None = None,
        unjoined: bool = False) -> list[Found]:
    """Of each rank. The working directory has the models. resume: go on from the checkpoint of an earlier run.
    forgotten: a line that makes its tensor on the host. unjoined: nothing waits for what an onload copies."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "p.rlf"
    path.write_text(case.source.replace("steps=1", "steps=2") if resume else case.source)
    data = compile_program(path, {}, f"cluster nodes=1 gpus={case.ranks}\n{case.place}\n", folder)
    return run_world(case.ranks, _rank, data, str(folder / "run/out"), os.getcwd(), resume, forgotten, unjoined)


def _rank(rank: int, data: bytes, out: str, cwd: str, resume: bool,
          forgotten: tuple[str, str, int] | None, unjoined: bool) -> Found:
    from rldsl.runtime.host_memory import HostMemory
    from rldsl.runtime.interpreter import conversations
    from rldsl.runtime.interpreter.interpreter import execute
    from rldsl.runtime.interpreter.options import Options
    from rldsl.runtime.plan_file import PlanFile
    from tests.environments.scripted import Scripted

    os.chdir(cwd)
    conversations.open_conversations = (  # type: ignore[assignment]  # environments in this process
        lambda function, limits, sampling, tokens, rank, at: Scripted(tokens.tokenizer, None))
    if unjoined:
        plain = HostMemory.onload
        HostMemory.onload = lambda self, x: (plain(self, x)[0], lambda: None)  # type: ignore[method-assign]
    seen: Counter[tuple[str, Border]] = Counter()

    def note(border: Border) -> None:
        names = (REGIONS.get(f.f_code.co_qualname) for f in frames())
        seen[next(filter(None, names), ""), border] += 1

    options: dict[str, Any] = {"resume": Path(out), "continues": True} if resume else {}
    with guarded(note) as guard:
        guard.forgotten = forgotten
        execute(PlanFile.from_bytes(data, "test.plan"), out, device=DEVICE,
                options=Options(allow_write=(str(Path(out).parents[1]),), **options))
    return Found(seen, frozenset(guard.sites), guard.graphs, guard.replays, time.process_time())
