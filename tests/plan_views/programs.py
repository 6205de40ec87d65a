"""Programs whose plans have every kind of event and block, small enough to run."""

PPO = """
use std.ppo (kl_rewards, gae, ppo_clip, value_clip)
param lr     = 1e-3
param tokens = 6
data prompts = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=16)
model actor  = causal_lm("models/sft")   train adamw(lr=lr)
model critic = value_model("models/sft") train adamw(lr=1e-3)
model ref    = causal_lm("models/sft")
model judge  = reward_model("models/rm")
flow ppo(steps=3, seed=1) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, max_new_tokens=tokens)  on mesh(0:4) dp=2 pp=2
  score  = judge.score(gen)                               on mesh(2:4) pp=2
  ref_lp = ref.logprobs(gen)                              on mesh(0:4) tp=2 pp=2
  v      = critic.values(gen)                             on mesh(0:2) dp=2
  r        = kl_rewards(score, gen.logprobs, ref_lp, coef=0.1)
  adv, ret = gae(r, v, gamma=1.0, lam=0.95)
  critic.train(gen, loss=value_clip(old=v, ret=ret), minibatches=2)                  on mesh(2:4) tp=2
  actor.train(gen, loss=ppo_clip(old=gen.logprobs, adv=whiten(adv)), minibatches=2)  on mesh(0:2) dp=2
  metric score = mean(score)
  every 2 { save actor }
}
"""

GRPO = """
use std.grpo (group_norm, grpo_free)
state wanted = 4
data prompts = jsonl("data/prompts.jsonl", batch=2, max_prompt_tokens=32)
data heldout = jsonl("data/heldout.jsonl", batch=16, max_prompt_tokens=32)
model actor = causal_lm("models/sft") train adamw(lr=1e-3)
model slow  = causal_lm("models/sft")
flow grpo(steps=3, seed=1) {
  repeat {
    prompt = prompts.next()
    gen    = actor.generate(prompt, n=4, max_new_tokens=5)  on mesh(0:2) tp=2
    reward = len(gen) + mean(gen.logprobs by seq)
    adv    = group_norm(reward)
    kept   = gen where std(reward by prompt) > 0
  } until count(len(kept)) >= wanted max 3
  wanted = 0.5 * wanted + 2
  slow_lp = slow.logprobs(kept)                             on mesh(2:4) dp=2
  metric reward = mean(over(reward, kept))
  metric gap    = mean(slow_lp - kept.logprobs)
  actor.train(kept, loss=grpo_free(old=kept.logprobs, adv=adv), minibatches=2)  on mesh(2:4) dp=2
  ema slow from actor 0.9
  every 2 {
    eval heldout {
      question = heldout.next()
      best     = actor.generate(question, greedy=true, max_new_tokens=5)  on mesh(0:2) dp=2
      metric heldout_length = mean(len(best))
    }
    save actor
  }
  checkpoint every 2
}
"""

GENERATE = """
data prompts = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=16)
model actor = causal_lm("models/sft")
flow generate(steps=2, seed=1) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, max_new_tokens=4) on mesh(0:RANKS) dp=RANKS
  metric length  = mean(len(gen))
  metric logprob = mean(gen.logprobs)
}
"""
