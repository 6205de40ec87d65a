"""Programs whose responses continue in later steps. `{per_step}` is the option with its comma, or nothing; `{flow}`
more options of the flow."""

STOP = "stop=[\"1\", \"2\", \"3\", \"4\", \"x\", \"y\"]"
HEAD = """
use std.grpo (group_norm, grpo_free)
use std.sft (sft)
use py "recorder.py" (digits: gen -> seq)
param base = "models/sft"
param rows = "data/prompts.jsonl"
data prompts = jsonl(rows, batch=5, max_prompt_tokens=16)
"""
# responses of 1 to 11 tokens, in three parts; 11 is no multiple of 4
GRPO = HEAD + f"""
model actor = causal_lm(base{{exact}}) train adamw(lr={{lr}}, eps=1e-4, clip_grad=0)
flow grpo(steps={{steps}}, seed=3{{flow}}) {{{{
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=2, max_new_tokens=11, min_new_tokens=2, {STOP}{{per_step}})
  r      = digits(gen)
  actor.train(gen, loss=grpo_free(old=gen.logprobs, adv=group_norm(r)), minibatches=2)
  metric reward = mean(r)
  metric rows_of_step = count(r)
  {{more}}
}}}}
"""
AGE = "metric age = max(gen.version)\n  metric mean_age = mean(gen.version)"
# a frozen judge, a second batch of the same source in each step, a replay buffer, and a selection
MORE = HEAD + f"""
model actor = causal_lm(base) train adamw(lr=1e-3, eps=1e-4, clip_grad=0)
model ref   = causal_lm(base)
buffer good = rows(capacity=12)
flow run(steps=6, seed=5{{flow}}) {{{{
  asked  = prompts.next()
  short  = actor.generate(asked, max_new_tokens=3)
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=2, max_new_tokens=9, {STOP}, per_step=3)
  r      = digits(gen)
  won    = gen where r >= mean(r by prompt)
  good.add(won)
  kl     = gen.logprobs - ref.logprobs(gen)
  actor.train(gen, loss=grpo_free(old=gen.logprobs, adv=group_norm(r)), minibatches=2)
  old    = good.sample(4)
  actor.train(old, loss=sft())
  metric kl = mean(kl)
  metric reward = mean(r)
  metric short = mean(digits(short))
  metric late = mean(gen.version)
  {{more}}
}}}}
"""


def grpo(per_step: int = 4, lr: float = 2e-3, steps: int = 4, flow: str = "", more: str = "",
         exact: bool = False) -> str:
    """per_step: 0 for all in one step. exact: a prefill has the bits of decoding, so that no draw moves."""
    return GRPO.format(per_step=f", per_step={per_step}" if per_step else "", lr=lr, steps=steps, flow=flow, exact=", invariant=true" if exact else "",
                       more="\n  ".join(filter(None, [AGE if per_step else "", more])))
