"""Programs whose trained model has copies under other layouts: in the step, in blocks, in repeats, in evaluations."""

from __future__ import annotations

HEAD = """
use std.grpo (group_norm, grpo_free)
use std.sft (sft)
cluster nodes=1 gpus=4
data prompts = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=16)
model actor  = causal_lm("models/sft") train adamw(lr=1e-3)
place actor.*        on mesh(0:4) dp=2 tp=2
place actor.generate on mesh(0:4) dp=4 keep=KEPT
"""
HELD = """
data held = jsonl("data/prompts.jsonl", batch=8, max_prompt_tokens=16)
"""
OTHER = """
model other  = causal_lm("models/sft")
place other.* on mesh(0:4) dp=4
"""
TRAIN = "actor.train(gen, loss=grpo_free(old=gen.logprobs, adv=group_norm(len(gen))), minibatches=2)"
STEP = f"""
flow f(steps=3, seed=7) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=4, max_new_tokens=6)
  metric length = mean(len(gen))
  {TRAIN}
}}
"""
TWICE = f"""
flow f(steps=2, seed=7) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=2, max_new_tokens=6)
  {TRAIN}
  again  = actor.generate(prompt, n=2, max_new_tokens=4)
  more   = actor.generate(prompt, n=2, max_new_tokens=3)
  metric length = mean(len(again)) + mean(len(more))
}}
"""
REPEAT = f"""
flow f(steps=2, seed=7) {{
  first  = prompts.next()
  one    = actor.generate(first, n=2, max_new_tokens=4)
  metric one = mean(len(one))
  repeat 2 {{
    prompt = prompts.next()
    gen    = actor.generate(prompt, n=2, max_new_tokens=4)
    {TRAIN}
  }}
  final  = actor.generate(first, n=2, max_new_tokens=4)
  metric final = mean(len(final))
}}
"""
EVERY = f"""
flow f(steps=4, seed=7) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=2, max_new_tokens=4)
  metric length = mean(len(gen))
  every 2 {{
    {TRAIN}
    other_gen = actor.generate(prompt, n=2, max_new_tokens=4)
    metric other = mean(len(other_gen))
  }}
}}
"""
EVAL = f"""
flow f(steps=4, seed=7) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=2, max_new_tokens=4)
  {TRAIN}
  every 2 {{
    eval held {{
      question = held.next()
      answer   = actor.generate(question, greedy=true, max_new_tokens=4)
      metric length = mean(len(answer))
    }}
  }}
}}
"""
UNTIL = f"""
flow f(steps=2, seed=7) {{
  repeat {{
    prompt = prompts.next()
    tries  = actor.generate(prompt, n=2, max_new_tokens=4)
    gen    = tries where len(tries) > 0
  }} until count(gen) >= 12 max 3
  {TRAIN}
}}
"""
SYNC = f"""
flow f(steps=2, seed=7) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=2, max_new_tokens=4)
  lp     = other.logprobs(gen)
  metric kl = mean(gen.logprobs - lp)
  sync other from actor
  {TRAIN}
}}
"""
FLOWS = {"step": STEP, "twice": TWICE, "repeat": REPEAT, "every": EVERY, "eval": EVAL, "until": UNTIL, "sync": SYNC}


def program(flow: str, keep: bool) -> str:
    """The text of a program, whose generation copies are kept or not."""
    return HEAD.replace("KEPT", str(keep).lower()) + {"sync": OTHER, "eval": HELD}.get(flow, "") + FLOWS[flow]
