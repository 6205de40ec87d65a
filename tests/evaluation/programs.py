"""Programs with an evaluation, for the tests of this folder."""

from __future__ import annotations

HEAD = """
use std.ppo (ppo_clip)
use std.evaluation (pass_at)
data prompts = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=16)
data heldout = jsonl("data/heldout.jsonl", batch=3, max_prompt_tokens=16)
state best = 0
model actor = causal_lm("models/sft") train adamw(lr=1e-3)
"""
TRAIN = """
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=2, max_new_tokens=5)                   {on} dp={ranks}
  r      = len(gen) + sum(gen.logprobs by seq) + uniform(len(gen))
  actor.train(gen, loss=ppo_clip(old=gen.logprobs, adv=r), minibatches=2)  {on} tp={ranks}
  metric r = mean(r)
"""
EVAL = """
  every 2 {{
    eval heldout max 4 {{
      p     = heldout.next()
      best1 = actor.generate(p, greedy=true, max_new_tokens=6)             {on} {gen}
      ans   = actor.generate(p, n=4, max_new_tokens=6)                     {on} {gen}
      lp    = actor.logprobs(ans)                                          {on} {infer}
      score = sum(lp by seq)
      sure  = where(mean(lp by seq) > -3, 1, 0)
      coin  = uniform(score)
      metric rows      = count(best1)
      metric tries     = count(ans)
      metric score     = mean(score)
      metric spread    = std(score)
      metric per_token = mean(lp)
      metric greedy    = mean(sum(best1.logprobs by seq))
      metric pass2     = mean(pass_at(sure, 2))
      metric coin      = mean(coin)
    }}
  }}
"""
NAMES = ("rows", "tries", "score", "spread", "per_token", "greedy", "pass2", "coin")


def whole(evaluates: bool, first: bool = True, ranks: int = 1, gen: str = "dp=1", infer: str = "dp=1",
          steps: int = 4) -> str:
    """A program that trains. evaluates: with an evaluation, before (`first`) or after training."""
    parts = [EVAL, TRAIN] if first else [TRAIN, EVAL]
    body = "".join(p for p in parts if evaluates or p is TRAIN)
    body = body.format(on=f"on mesh(0:{ranks})", ranks=ranks, gen=gen, infer=infer)
    return f"{HEAD}flow turns(steps={steps}, seed=3) {{{body}}}\n"


def small(body: str, outside: str = "", where: str = "every 2", more: str = "") -> str:
    """A program whose evaluation has this body, to be checked alone. outside: statements after it."""
    block = f"eval heldout {{\n{body}\n}}"
    block = f"{where} {{\n{block}\n}}" if where else block
    return f"{HEAD}{more}flow f(steps=4) {{\n{TRAIN.format(on='on mesh(0:1)', ranks=1)}\n{block}\n{outside}\n}}\n"
