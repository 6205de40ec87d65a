"""Programs with a lag, by name; `{lag}` is what the flow is given. Run on one rank and on several placements."""

HEAD = '''
use std.grpo (group_norm, grpo)
use std.ppo (gae, kl_rewards, ppo_clip, value_clip)
use std.sft (sft)
use py "rewards_small.py" (digits: gen -> seq)
param base = "models/sft"
param rm   = "models/rm"
param rows = "data/prompts.jsonl"
data prompts = jsonl(rows, batch=4, max_prompt_tokens=16)
model actor = causal_lm(base) train adamw(lr=1e-3, eps=1e-3)
'''

PROGRAMS = {
    "ppo": HEAD + '''
model critic = value_model(base) train adamw(lr=1e-3, eps=1e-3)
model ref    = causal_lm(base)
model judge  = reward_model(rm)
state beta = 0.1
flow run(steps=4, seed=3, lag={lag}) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=2, max_new_tokens=4)
  score  = judge.score(gen)
  ref_lp = ref.logprobs(gen)
  now    = actor.logprobs(gen)
  v      = critic.values(gen)
  adv, ret = gae(kl_rewards(score, now, ref_lp, coef=beta), v, gamma=1.0, lam=0.95)
  critic.train(gen, loss=value_clip(old=v, ret=ret), minibatches=2)
  actor.train(gen, loss=ppo_clip(old=now, adv=whiten(adv)), minibatches=2)
  metric kl   = mean(gen.logprobs - ref_lp)
  metric late = mean(abs(now - gen.logprobs))
  beta = clip(beta * (1 + mean(gen.logprobs - ref_lp)), 0.01, 1)
  every 2 { sync ref from actor }
}
''',
    # the generating model follows the trained one, rows are drawn by a state that the step writes, answers are judged
    # by a second generation, good ones are kept and trained on once more
    "much": HEAD + '''
model slow = causal_lm(base)
state rate of prompts = 0.5
buffer good = rows(capacity=12)
data held = jsonl(rows, batch=4, max_prompt_tokens=16)
flow run(steps=5, seed=3, lag={lag}) {
  prompt = prompts.next(weight=1.5 - prompts.rate)
  gen    = slow.generate(prompt, n=2, max_new_tokens=4)
  more   = actor.generate(gen, n=2, max_new_tokens=2)
  r      = digits(gen)
  won    = gen where r >= median(r by batch)
  good.add(won)
  prompt.rate = 0.5 * prompt.rate + 0.5 * clip(mean(r by prompt), 0, 1)
  actor.train(won, loss=sft())
  old = good.sample(6)
  actor.train(old, loss=sft())
  ema slow from actor 0.5
  metric reward = mean(r)
  metric length = mean(len(more))
  every 2 {
    eval held {
      asked  = held.next()
      answer = actor.generate(asked, greedy=true, max_new_tokens=4)
      metric answers = mean(digits(answer))
    }
  }
}
''',
}
