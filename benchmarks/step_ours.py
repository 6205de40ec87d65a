"""rldsl at the work of `benchmarks/step.py`: the program compiled, then executed as `rldsl.run` executes it.

    python -m benchmarks.step_ours WORK     # started by benchmarks/step.py
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
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


def run(work: Work) -> Times:
    """Compiled and executed in this process; users' functions are called in two workers, as on this machine."""
    import torch
    import torch.distributed as dist

    from rldsl import api
    from rldsl.plan.codec import encode
    from rldsl.plan.events import Loop
    from rldsl.runtime.interpreter.interpreter import Interpreter, execute
    from rldsl.runtime.interpreter.options import Options
    from rldsl.runtime.plan_file import PlanFile

    torch.set_num_threads(1)
    folder, clock = Path(work.folder), Clock()
    text = {"grpo": GRPO_REF if work.ref else GRPO, "ppo": PPO, "sft": SFT}[work.name.partition(" ")[0]]
    program = folder / f"{work.name.partition(' ')[0]}.rlf"
    program.write_text(text)
    (folder / "digits.py").write_text(REWARD)
    asked = dict(base=work.base, rm=work.rm, data=f"{work.folder}/data", steps=work.steps, batch=work.batch, n=work.n,
                 longest=work.prompt, tokens=work.tokens, updates=work.updates, lr=work.lr)
    plan = encode(api.compile(str(program), asked))

    class Timed(Interpreter):
        def iterate(self, loop: Loop) -> Iterator[int]:
            steps = self.depth == 0
            for i in super().iterate(loop):
                if steps:
                    clock.mark()
                yield i
            if steps:
                clock.mark()

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    out = folder / "ours"
    execute(PlanFile.from_bytes(plan, program.name), out,
            options=Options(overwrite=True, reward_workers=2, allow_write=(work.folder,)),
            run=lambda walk: Timed(walk.state, walk.items, walk.recorder, walk.profiler).run())
    dist.destroy_process_group()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rows = work.batch * work.n
    return clock.times([line.get("length/response", 0.0) * rows for line in lines])


if __name__ == "__main__":
    serve({"grpo": run, "ppo": run, "sft": run})
