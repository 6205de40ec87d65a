"""rldsl at the work of `benchmarks/step.py`: the program compiled, then executed as `rldsl.run` executes it.

    python -m benchmarks.step_ours WORK     # started by benchmarks/step.py
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from benchmarks.step_work import Clock, Times, Work, serve, share_of_digits

REWARD = inspect.getsource(share_of_digits) + """

def digits(rows):
    return [share_of_digits(row["completion"]) for row in rows]
"""
HEAD = """param base: text
param rm: text
param data: text
param steps: int
param batch: int
param n: int
param longest: int
param tokens: int
param updates: int
param lr: number
"""
GRPO = HEAD + """use std.grpo (group_norm, grpo_free)
use py "digits.py" (digits: gen -> seq)
data prompts = jsonl(data + "/prompts.jsonl", batch=batch, max_prompt_tokens=longest)
model actor = causal_lm(base) train adamw(lr=lr, weight_decay=0.0, clip_grad=1.0)
flow grpo(steps=steps, seed=1) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=n, max_new_tokens=tokens)
  reward = digits(gen)
  actor.train(gen, loss=grpo_free(old=gen.logprobs, adv=group_norm(reward)), minibatches=updates)
  metric reward = mean(reward)
}
"""
GRPO_REF = (GRPO.replace("grpo_free", "grpo").replace("adv=group_norm(reward))", "adv=group_norm(reward), ref=ref_lp)")
            .replace("flow grpo", "model ref = causal_lm(base)\nflow grpo")
            .replace("  reward = digits", "  ref_lp = ref.logprobs(gen)\n  reward = digits"))
PPO = HEAD + """use std.ppo (kl_rewards, gae, ppo_clip, value_clip)
data prompts = jsonl(data + "/prompts.jsonl", batch=batch, max_prompt_tokens=longest)
model actor  = causal_lm(base)   train adamw(lr=lr, weight_decay=0.0, clip_grad=1.0)
model critic = value_model(base) train adamw(lr=lr, weight_decay=0.0, clip_grad=1.0)
model ref    = causal_lm(base)
model judge  = reward_model(rm)
flow ppo(steps=steps, seed=1) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=n, max_new_tokens=tokens)
  score  = judge.score(gen)
  ref_lp = ref.logprobs(gen)
  v      = critic.values(gen)
  r        = kl_rewards(score, gen.logprobs, ref_lp, coef=0.1)
  adv, ret = gae(r, v, gamma=1.0, lam=0.95)
  critic.train(gen, loss=value_clip(old=v, ret=ret), minibatches=updates)
  actor.train(gen, loss=ppo_clip(old=gen.logprobs, adv=whiten(adv)), minibatches=updates)
  metric score = mean(score)
}
"""
SFT = HEAD + """use std.sft (sft)
data answers = jsonl(data + "/answers.jsonl", batch=batch, max_prompt_tokens=longest, max_answer_tokens=tokens + 1)
model actor = causal_lm(base) train adamw(lr=lr, weight_decay=0.0, clip_grad=1.0)
flow sft(steps=steps, seed=1) {
  answer = answers.next()
  actor.train(answer, loss=sft(), minibatches=updates)
}
"""


RANK = "STEP_OURS_RANK"  # environment variable of ranks other than 0


def run(work: Work) -> Times:
    """Executed in this process, and in one for each other rank; users' functions are called in two workers, as on this
    machine."""
    plan, rank = Path(work.folder) / f"{work.name.partition(' ')[0]}.plan", int(os.environ.get(RANK, "0"))
    others = []
    if rank == 0:
        plan.write_bytes(compiled(work))
        others = [subprocess.Popen([sys.executable, "-m", "benchmarks.step_ours", json.dumps(asdict(work))],
                                   env=os.environ | {RANK: str(i)}, stdout=subprocess.DEVNULL)
                  for i in range(1, work.ranks)]
    try:
        times = execute_plan(work, plan, rank)
        if any([other.wait() for other in others]):
            raise RuntimeError("another rank failed")
    finally:
        for other in others:
            other.kill()
    return times


def compiled(work: Work) -> bytes:
    """The plan of the work's program, which is written to its folder."""
    from rldsl import api
    from rldsl.plan.codec import encode

    text = {"grpo": GRPO_REF if work.ref else GRPO, "ppo": PPO, "sft": SFT}[work.name.partition(" ")[0]]
    if work.ranks > 1:
        text += f"place *.* on mesh(0:{work.ranks}) dp={work.ranks}\n"
    program = Path(work.folder) / f"{work.name.partition(' ')[0]}.rlf"
    program.write_text(text)
    program.with_name("digits.py").write_text(REWARD)
    asked = dict(base=work.base, rm=work.rm, data=f"{work.folder}/data", steps=work.steps, batch=work.batch, n=work.n,
                 longest=work.prompt, tokens=work.tokens, updates=work.updates, lr=work.lr)
    return encode(api.compile(str(program), asked))


def execute_plan(work: Work, plan: Path, rank: int) -> Times:
    """As one rank of it. Returns the times of this rank's steps."""
    import torch
    import torch.distributed as dist

    from rldsl.plan.events import Loop
    from rldsl.runtime.interpreter.interpreter import Interpreter, execute
    from rldsl.runtime.interpreter.options import Options
    from rldsl.runtime.plan_file import PlanFile

    torch.set_num_threads(1)
    folder, clock = Path(work.folder), Clock()

    class Timed(Interpreter):
        def iterate(self, loop: Loop) -> Iterator[int]:
            steps = self.depth == 0
            for i in super().iterate(loop):
                if steps:
                    clock.mark()
                yield i
            if steps:
                clock.mark()

    store = dist.HashStore() if work.ranks == 1 else dist.FileStore(str(folder / "store"), work.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=work.ranks)
    out = folder / "ours"
    execute(PlanFile.from_bytes(plan.read_bytes(), plan.name), out,
            options=Options(overwrite=True, reward_workers=2, allow_write=(work.folder,)),
            run=lambda walk: Timed(walk.state, walk.items, walk.recorder, walk.profiler).run())
    dist.destroy_process_group()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rows = work.batch * work.n
    return clock.times([line.get("length/response", 0.0) * rows for line in lines])


if __name__ == "__main__":
    serve({"grpo": run, "ppo": run, "sft": run})
