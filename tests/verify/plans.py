"""Plans that the compiler makes, small enough to be stepped through: every kind of event, block and record."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from rldsl import api
from rldsl.plan.model import Plan
from tests.evaluation.programs import whole
from tests.tiny import make_all, make_model

ROOT = Path(__file__).parents[2]
REWARDS = """
def size(prompt, completion, **columns):
    return float(len(completion))
def right(completion, gen, **columns):
    return float(completion == gen["completion"])
def grade(completion, gen, **columns):
    return float(completion in gen["completion"])
def ask(completion, **columns):
    return completion
def ask_some(completion, **columns):
    return completion or None
"""
GRPO = """
use std.grpo (group_norm, grpo)
use py "rewards.py" (size: gen, prompt -> seq)
cluster nodes=1 gpus=4
data prompts = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=16)
model actor = causal_lm("models/sft", lora(r=4, targets=["q_proj", "down_proj"])) train adamw(lr=1e-3, warmup=2)
model ref   = causal_lm("models/sft")
flow grpo(steps=6, seed=7) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=4, max_new_tokens=6, temperature=0.9)   on mesh(0:4) dp=4
  ref_lp = ref.logprobs(gen)                                                on mesh(2:4) dp=2 offload=true
  reward = size(gen, prompt)
  adv    = group_norm(reward)
  metric reward = mean(reward)
  metric kl     = mean(gen.logprobs - ref_lp)
  metric hist gap = gen.logprobs - ref_lp bins=8
  metric table answers = gen, reward rows=3
  actor.train(gen, loss=grpo(old=gen.logprobs, adv=adv, ref=ref_lp, beta=0.05), minibatches=2)   on mesh(0:4) dp=2 tp=2
  every 3 { save actor }
  checkpoint every 2
}
"""
SYNC = """
use std.sft (sft)
cluster nodes=2 gpus=2
data rows = jsonl("data/train.jsonl", batch=6)
model actor = causal_lm("models/sft") train adamw(lr=0.02, group("*.layers.0.*", lr_scale=0.5, weight_decay=0))
model ref   = causal_lm("models/sft")
model slow  = causal_lm("models/sft")
flow f(steps=3) {
  row = rows.next()
  r = ref.logprobs(row)    on mesh(0:1, 0:2) dp=2
  s = ref.logprobs(row)    on mesh(1:2, 0:2) tp=2
  q = slow.logprobs(row)   on mesh(1:2, 0:2) dp=2 offload=true
  metric m = mean(r) + mean(s) + mean(q)
  actor.train(row, loss=sft())   on mesh(0:1, 0:2) pp=2
  sync ref from actor every 2
  ema slow from actor 0.9
  save slow to "x"
}
"""
ROW_STATES = """
use std.sft (sft)
cluster nodes=1 gpus=4
data prompts = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=16, numbers=["number"])
data rows = jsonl("data/train.jsonl", batch=4)
state rate of prompts = 0.5
state seen of prompts = 0
state seen of rows = 0
state heat = 2
model actor = causal_lm("models/sft") train adamw(lr=0.02)
flow f(steps=3) {
  row    = rows.next()
  prompt = prompts.next(weight=exp(-prompts.rate * heat) + prompts.number)
  gen    = actor.generate(prompt, n=2, max_new_tokens=4)   on mesh(0:4) dp=4
  prompt.rate = 0.5 * prompt.rate + mean(len(gen) by prompt)
  kept = prompt where prompt.rate > 1
  kept.seen = kept.seen + 1
  row.seen = row.seen + len(row)
  every 2 { prompt.rate = 0 }
  heat = 0.9 * heat
  metric m = mean(prompt.rate) + mean(prompt.seen) + mean(row.seen)
  actor.train(row, loss=sft())   on mesh(0:2) dp=2
  checkpoint every 2
}
"""
LAG = """
use std.grpo (group_norm, grpo)
use py "rewards.py" (size: gen, prompt -> seq)
cluster nodes=1 gpus=4
data prompts = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=16)
state heat = 2
model actor = causal_lm("models/sft") train adamw(lr=1e-3)
model ref   = causal_lm("models/sft")
flow f(steps=5, seed=7, lag=2) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=2, max_new_tokens=4)   on mesh(0:2) dp=2
  r      = size(gen, prompt) * heat
  ref_lp = ref.logprobs(gen)   on mesh(2:4) dp=2 offload=true
  actor.train(gen, loss=grpo(old=gen.logprobs, ref=ref_lp, adv=group_norm(r)))   on mesh(2:4) tp=2
  heat   = heat + mean(gen.logprobs)
  first 2 { metric early = mean(r) }
  after 1 { every 2 { sync ref from actor } }
  metric late = mean(ref_lp)
  stop when heat > 2
  checkpoint every 2
}
"""
AHEAD = """
use std.sft (sft)
use py "rewards.py" (size: gen, prompt -> seq)
cluster nodes=1 gpus=4
data prompts = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=16)
data others  = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=16)
model actor = causal_lm("models/sft") train adamw(lr=1e-3)
flow f(steps=5, seed=7, lag=1) {
  repeat {
    more  = prompts.next()
    tries = actor.generate(more, n=2, max_new_tokens=4)   on mesh(0:2) dp=2
    r     = size(tries, more)
    kept  = tries where r > 1
  } until count(kept) >= 12 max 3
  actor.train(kept, loss=sft())   on mesh(2:4) dp=2
  every 2 {
    o   = others.next()
    gen = actor.generate(o, max_new_tokens=4)   on mesh(0:2) dp=2
    actor.train(gen, loss=sft())                on mesh(2:4) dp=2
    metric size = mean(size(gen, o))
  }
  metric asked = count(tries)
  checkpoint every 2
}
"""
REPLAY = """
use std.sft (sft)
use py "rewards.py" (size: gen, prompt -> seq)
cluster nodes=1 gpus=4
data prompts = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=16)
buffer good = rows(capacity=7)
state heat = 2
model actor = causal_lm("models/sft") train adamw(lr=0.02)
flow f(steps=3) {
  first  = good.sample(3, weight=good.x * heat + where(good.finished, 0.5, 0))
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=2, max_new_tokens=4)   on mesh(0:4) dp=4
  scored = gen with x=size(gen, prompt), y=gen.logprobs * 2
  kept   = scored where scored.x > 1
  good.add(kept)
  old    = good.sample(6)
  more   = scored where scored.x > 2
  every 2 { good.add(more) }
  heat = 0.9 * heat
  metric m = mean(first.x) + mean(old.y)
  actor.train(old, loss=sft(), minibatches=2)   on mesh(0:2) dp=2
  checkpoint every 2
}
"""
VINE = """
use std.sft (sft)
use py "rewards.py" (size: gen -> seq, right: tail, gen -> seq)
cluster nodes=1 gpus=4
data prompts = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=16)
model actor = causal_lm("models/sft") train adamw(lr=1e-3)
loss pg(logprobs: token; adv: token) { return -mean(adv * logprobs) }
flow f(steps=3) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=2, max_new_tokens=6)              on mesh(0:4) dp=4
  cuts   = prefixes(gen, every=2, most=3)
  tail   = actor.generate(cuts, n=2, max_new_tokens=4)                on mesh(0:4) dp=4 reuse=true
  v      = mean(right(tail, gen) by prompt)
  adv    = along(next(v by prompt) + at_end(size(gen), cuts) - v, gen)
  kept   = gen where size(gen) > mean(tail.logprobs by gen)
  more   = actor.generate(kept, n=2, max_new_tokens=3)                on mesh(0:4) dp=4 reuse=true
  full   = whole(more)
  back   = over(mean(size(more) by prompt), gen, 0)
  actor.train(gen, loss=pg(adv=adv + back), minibatches=2)            on mesh(0:4) dp=2 tp=2
  actor.train(full, loss=sft())                                       on mesh(0:4) dp=2 tp=2
  metric at   = mean(cuts.at) + mean(cumsum(len(full) by prompt)) + mean(last(back by prompt))
  metric kept = mean(discount(kept.logprobs, 0.9)) + mean(count(v by gen))
}
"""
TEXTS = """
use std.simpo (simpo)
use std.sft (sft)
use py "rewards.py" (size: gen -> seq, grade: verdict, gen -> seq, ask: gen -> prompts(max_tokens=20),
                     ask_some: gen -> prompts?(max_tokens=12))
cluster nodes=1 gpus=4
data prompts = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=16)
data further = jsonl("data/prompts.jsonl", batch=2, max_prompt_tokens=12)
buffer good = rows(capacity=5)
model actor = causal_lm("models/sft") train adamw(lr=1e-3)
model judge = causal_lm("models/judge")
flow f(steps=3) {
  old     = good.sample(3)
  prompt  = prompts.next()
  second  = further.next()
  gen     = actor.generate(prompt, n=3, max_new_tokens=6)              on mesh(0:4) dp=4
  other   = actor.generate(second, n=3, max_new_tokens=4)              on mesh(0:4) dp=4
  verdict = judge.generate(ask(gen), n=2, max_new_tokens=3)            on mesh(0:2) dp=2
  some    = judge.generate(ask_some(gen), max_new_tokens=2)            on mesh(0:2) dp=2
  r       = mean(grade(verdict, gen) by prompt)
  scored  = gen with x=r
  duel    = pair(pick(scored, r), pick(scored, -r))
  clear   = duel where duel.chosen.x > duel.rejected.x
  rival   = others(scored)
  good.add(scored where r > 0)
  hinted  = actor.logprobs(gen, prompt=ask(gen))                       on mesh(0:2) tp=2
  metric hinted = mean(hinted)
  mix     = concat(scored, old)
  two     = concat(gen, other)
  actor.train(clear.chosen, clear.rejected, loss=simpo())              on mesh(0:4) dp=4
  actor.train(two, loss=sft(), minibatches=2)                          on mesh(0:4) dp=4
  metric some = mean(mean(size(some) by prompt))
  metric m = mean(mix.x) + mean(rival.x) + mean(max(len(two) by prompt)) + mean(rival.logprobs)
}
"""
TWO = "cluster nodes=1 gpus=2\nplace actor.* on mesh(0:2) tp=2\nplace slow.* on mesh(0:2) dp=2\n"


@contextmanager
def folder() -> Iterator[Path]:
    """With the tiny models and data of the examples, and as the current directory."""
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as here:
        made = make_all(Path(name))
        here.chdir(made)
        (made / "rewards.py").write_text(REWARDS)
        yield made


@cache
def compiled() -> dict[str, Plan]:
    with folder() as here:
        for name, text in (("grpo", GRPO), ("sync", SYNC), ("rows", ROW_STATES), ("replay", REPLAY), ("lag", LAG), ("ahead", AHEAD), ("vine", VINE), ("texts", TEXTS),
                           ("eval", whole(True, ranks=2, gen="dp=2", infer="dp=2"))):
            (here / f"{name}.rlf").write_text(text)
        (here / "two.rlf").write_text(TWO)
        make_model(here / "models/judge", num_hidden_layers=2, seed=3)
        sets = {"base": "models/sft", "rows": "data/prompts.jsonl"}
        return {
            "ppo": api.compile(str(ROOT / "examples/ppo.rlf"), {"batch": 8, "steps": 5}),
            "dpo": api.compile(str(ROOT / "examples/dpo.rlf"), {"batch": 8, "steps": 4}),
            "grpo": api.compile("grpo.rlf"),
            "sync": api.compile("sync.rlf"),
            "rows": api.compile("rows.rlf"),
            "replay": api.compile("replay.rlf"),
            "lag": api.compile("lag.rlf"),
            "ahead": api.compile("ahead.rlf"),
            "vine": api.compile("vine.rlf"),
            "texts": api.compile("texts.rlf"),
            "eval": api.compile("eval.rlf"),
            "dynamic": api.compile(str(ROOT / "tests/end_to_end/dynamic.rlf"), sets),
            "small": api.compile(str(ROOT / "tests/checkpoint/small.rlf"), sets, "two.rlf"),
        }
