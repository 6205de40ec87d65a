"""Programs whose runs reach the bounds of their plans: every prompt and every response is as long as it may be.

Models are small, and wide enough that what grows with them outweighs what does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rldsl.api import compile
from rldsl.plan.model import Plan
from tests.tiny import make_model, write_jsonl

SIZES = dict(hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
             max_position_embeddings=512, vocab_size=8192)
GPT2 = dict(n_embd=256, n_layer=4, n_head=8, n_positions=512, vocab_size=8192)
HEAD_DIM = ("qwen3", "gemma")  # families whose default is for larger models

GRPO = """
use std.grpo (group_norm, grpo)
data prompts = jsonl("prompts.jsonl", batch={batch}, max_prompt_tokens={prompt})
model actor = causal_lm("m", dtype={dtype}{adapters}) train adamw(lr=1e-4)
model ref   = causal_lm("m", dtype={dtype})
flow run(steps=2) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, n={n}, max_new_tokens={response}, min_new_tokens={response}, {sampling})
  ref_lp = ref.logprobs(gen)
  actor.train(gen, loss=grpo(old=gen.logprobs, adv=group_norm(len(gen)), ref=ref_lp, beta=0.1),
    minibatches={minibatches})
{more}
}}
"""
PPO = """
use std.ppo (kl_rewards, gae, ppo_clip, value_clip)
data prompts = jsonl("prompts.jsonl", batch={batch}, max_prompt_tokens={prompt})
model actor  = causal_lm("m", dtype={dtype}) train adamw(lr=1e-4)
model critic = value_model("m", dtype={dtype}) train adamw(lr=1e-4)
model ref    = causal_lm("m", dtype={dtype})
model judge  = reward_model("rm", dtype={dtype})
flow run(steps=2) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, max_new_tokens={response}, min_new_tokens={response}, {sampling})
  score  = judge.score(gen)
  ref_lp = ref.logprobs(gen)
  v      = critic.values(gen)
  r        = kl_rewards(score, gen.logprobs, ref_lp, coef=0.1)
  adv, ret = gae(r, v, gamma=1.0, lam=0.95)
  critic.train(gen, loss=value_clip(old=v, ret=ret), minibatches={minibatches})
  actor.train(gen, loss=ppo_clip(old=gen.logprobs, adv=whiten(adv)), minibatches={minibatches})
{more}
}}
"""
DPO = """
use std.dpo (dpo)
data pairs = jsonl("pairs.jsonl", batch={batch}, max_prompt_tokens={prompt}, max_answer_tokens={response})
model actor = causal_lm("m", dtype={dtype}{adapters}) train adamw(lr=1e-4)
model ref   = causal_lm("m", dtype={dtype})
flow run(steps=2) {{
  pair         = pairs.next()
  ref_chosen   = ref.logprobs(pair.chosen)
  ref_rejected = ref.logprobs(pair.rejected)
  actor.train(pair.chosen, pair.rejected, loss=dpo(ref_chosen=ref_chosen, ref_rejected=ref_rejected, beta=0.1),
    minibatches={minibatches})
{more}
}}
"""
SFT = """
use std.sft (sft)
data rows = jsonl("pairs.jsonl", batch={batch}, max_prompt_tokens={prompt}, max_answer_tokens={response},
  answer="chosen", kind="answers")
model actor = causal_lm("m", dtype={dtype}{adapters}) train adamw(lr=1e-4)
flow run(steps=2) {{
  row = rows.next()
  actor.train(row, loss=sft(), minibatches={minibatches})
{more}
}}
"""
UNTIL = """
use std.grpo (group_norm, grpo_free)
data prompts = jsonl("prompts.jsonl", batch={batch}, max_prompt_tokens={prompt})
model actor = causal_lm("m", dtype={dtype}) train adamw(lr=1e-4)
flow run(steps=2) {{
  repeat {{
    prompt = prompts.next()
    gen    = actor.generate(prompt, max_new_tokens={response}, min_new_tokens={response}, {sampling})
    adv    = group_norm(len(gen))
    kept   = gen where len(gen) > 0
  }} until count(kept) >= {wanted} max 2
  actor.train(kept, loss=grpo_free(old=kept.logprobs, adv=adv), minibatches={minibatches})
{more}
}}
"""
CONTINUED = """
use std.grpo (group_norm, grpo)
data prompts = jsonl("prompts.jsonl", batch={batch}, max_prompt_tokens={prompt})
model actor = causal_lm("m", dtype={dtype}) train adamw(lr=1e-4)
model ref   = causal_lm("m", dtype={dtype})
flow run(steps=2) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, n={n}, max_new_tokens={response}, min_new_tokens={response}, {sampling})
  more   = actor.generate(gen, n=2, max_new_tokens={response}, min_new_tokens={response}, {sampling})
  rival  = others(gen)
  far    = ref.logprobs(rival)
  ref_lp = ref.logprobs(more)
  adv    = group_norm(len(more)) + mean(mean(far by seq) by prompt)
  actor.train(more, loss=grpo(old=more.logprobs, adv=adv, ref=ref_lp, beta=0.1), minibatches={minibatches})
{more}
}}
"""


TOP = """
use std.gkd (gkd)
data prompts = jsonl("prompts.jsonl", batch={batch}, max_prompt_tokens={prompt})
model actor = causal_lm("m", dtype={dtype}{adapters}) train adamw(lr=1e-4)
model ref   = causal_lm("m", dtype={dtype})
flow run(steps=2) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, n={n}, max_new_tokens={response}, min_new_tokens={response}, {sampling})
  t      = ref.top(gen, k=256)
  actor.train(gen, loss=gkd(teacher=t.logprobs), minibatches={minibatches})
{more}
}}
"""


WHOLE = TOP.replace("t      = ref.top(gen, k=256)", "t      = ref.distribution(gen)").replace("t.logprobs", "t")


@dataclass(frozen=True)
class Case:
    """place: rules of placement. sizes: of the model, where they are not `SIZES`."""

    name: str
    world: int = 1
    place: str = ""
    program: str = GRPO
    family: str = "llama"
    dtype: str = "float32"
    adapters: str = ""
    batch: int = 8
    n: int = 1
    prompt: int = 32
    response: int = 32
    minibatches: int = 1
    sampling: str = "temperature=1"
    more: str = ""
    sizes: tuple[tuple[str, int], ...] = ()
    wanted: int = 0
    top: str = ""


def on(world: int, train: str, generate: str = "", ref: str = "") -> str:
    """Rules for GRPO on all ranks; dp alone where nothing else is said."""
    parts = (("actor.train", train), ("actor.generate", generate or f"dp={world}"), ("ref.*", ref or f"dp={world}"))
    return "\n".join(f"place {selector} on mesh(0:{world}) {degrees}" for selector, degrees in parts)


REAL = """place actor.generate on mesh(0:4) dp=2 pp=2
place judge.*       on mesh(2:4) pp=2
place ref.*         on mesh(2:4) tp=2
place critic.values on mesh(0:2) dp=2
place critic.train  on mesh(2:4) pp=2 mbs=2
place actor.train   on mesh(0:2) tp=2 recompute=full"""
ONE = "place actor.train on mesh(0:1) "

CASES = (
    Case("one rank"),
    Case("mbt", place=ONE + "mbt=512\nplace ref.logprobs on mesh(0:1) mbt=1024"),
    Case("mbs", place=ONE + "mbs=2\nplace ref.logprobs on mesh(0:1) mbs=4"),
    Case("large batch", batch=32),
    Case("recompute", batch=32, place=ONE + "recompute=full"),
    Case("recompute, mbs, wide", batch=16, place=ONE + "recompute=full mbs=4",
         sizes=(("hidden_size", 512), ("intermediate_size", 1408), ("num_hidden_layers", 6))),
    Case("qwen3, long", family="qwen3", prompt=64, response=96),
    Case("gemma", family="gemma", batch=16),
    Case("gpt2", family="gpt2", batch=16),
    Case("gpt2, half", family="gpt2", batch=16, dtype="bfloat16"),
    Case("qwen3, half", family="qwen3", batch=16, dtype="bfloat16"),
    Case("half, recompute", batch=32, dtype="bfloat16", place=ONE + "recompute=full"),
    Case("adapters", batch=16, adapters=", lora(r=8)"),
    Case("adapters, half", batch=16, adapters=", lora(r=8)", dtype="bfloat16"),
    Case("top_p", batch=16, n=4, prompt=8, response=8, sampling="top_p=0.9"),
    Case("top_k", batch=64, prompt=8, response=8, sampling="top_k=10", place=ONE + "mbs=2"),
    Case("greedy, slots", batch=64, prompt=8, response=8, sampling="greedy=true",
         place="place actor.generate on mesh(0:1) mbs=16\n" + ONE + "mbs=8"),
    Case("top k", program=TOP, batch=16, place=ONE + "mbs=4\nplace ref.* on mesh(0:1) mbs=4"),
    Case("top k, tp=2", 2, on(2, "tp=2", "tp=2", "tp=2"), program=TOP, batch=16, response=48),
    Case("whole vocabulary", program=WHOLE, batch=16, response=96,
         place=ONE + "mbs=8\nplace ref.* on mesh(0:1) mbs=8"),
    Case("sft", program=SFT, batch=16, place=ONE + "mbs=4"),
    Case("dpo", program=DPO),
    Case("ppo", program=PPO, minibatches=2),
    Case("until", program=UNTIL, wanted=16),
    Case("continued", program=CONTINUED, n=2, minibatches=2),
    Case("continued, dp=2", 2, on(2, "dp=2"), program=CONTINUED, n=3),
    Case("ema", more="  ema slow from actor 0.9\n  save slow", top='model slow = causal_lm("m")'),
    Case("save, checkpoint", more="  every 1 { save actor }\n  checkpoint every 1"),
    Case("dp=2", 2, on(2, "dp=2"), batch=16),
    Case("tp=2", 2, on(2, "tp=2", "tp=2", "tp=2"), batch=16),
    Case("tp=2, half, saved", 2, on(2, "tp=2", "tp=2", "tp=2"), batch=16, dtype="bfloat16",
         more="  every 1 { save actor }"),
    Case("pp=2", 2, on(2, "pp=2", "pp=2", "pp=2"), batch=16),
    Case("pp=2, mbs", 2, on(2, "pp=2 mbs=2", "pp=2", "pp=2 mbs=2"), batch=32),
    Case("pp=2, recompute, dp=2", 2, on(2, "pp=2 recompute=full mbs=4"), batch=32),
    Case("tied", batch=2, response=8, sizes=(("tie_word_embeddings", True),)),
    Case("zero=1", 2, on(2, "dp=2 zero=1"), batch=2),
    Case("zero=1, mbs, tied", 2, on(2, "dp=2 zero=1 mbs=1"), batch=4, sizes=(("tie_word_embeddings", True),)),
    Case("zero=2, half", 2, on(2, "dp=2 zero=2"), batch=16, dtype="bfloat16"),
    Case("zero=2, recompute", 4, on(4, "dp=4 zero=2 mbs=2 recompute=full"), batch=16),
    Case("zero=2, pp=2", 4, on(4, "dp=2 pp=2 zero=2 mbs=2"), batch=16),
    Case("zero=3, small head", 2, on(2, "dp=2 zero=3"), batch=4, sizes=(("vocab_size", 512),)),
    Case("zero=3, tp=2", 4, on(4, "dp=2 tp=2 zero=3"), batch=16, minibatches=2),
    Case("tp=2, dp=2", 2, on(2, "tp=2", "", "tp=2"), batch=16, minibatches=2),
    Case("dpo pp=2", 2, "place actor.* on mesh(0:2) pp=2 mbs=2\nplace ref.* on mesh(0:2) dp=2", program=DPO, batch=16),
    Case("dp=2 tp=2, dp=4", 4, on(4, "dp=2 tp=2"), batch=16),
    Case("dp=2 pp=2, dp=4", 4, on(4, "dp=2 pp=2 mbs=2"), batch=16, family="qwen3"),
    Case("tp=2 pp=2, recompute", 4, on(4, "tp=2 pp=2 recompute=full", "tp=2 pp=2", "tp=4"), batch=16),
    Case("pp=4, dp=2 tp=2", 4, on(4, "pp=4 mbs=2", "dp=2 tp=2", "pp=4 mbs=1"), batch=32),
    Case("ppo, as ReaL", 4, REAL, program=PPO, batch=16, minibatches=2),
)


def plan_of(case: Case, folder: Path) -> Plan:
    """Compile it, with a model and data in `folder`, which is the working directory."""
    sizes = (GPT2 if case.family == "gpt2" else SIZES) | dict(case.sizes)
    if case.family in HEAD_DIM:
        sizes.setdefault("head_dim", sizes["hidden_size"] // sizes["num_attention_heads"])
    make_model(folder / "m", family=case.family, **sizes)
    if case.program == PPO:
        make_model(folder / "rm", family=case.family, head="reward_model", seed=1, **sizes)
    prompt, answer = "7" * case.prompt, "5" * (case.response - 1)  # and the token that ends it
    write_jsonl(folder / "prompts.jsonl", [{"prompt": prompt}] * (4 * case.batch))
    write_jsonl(folder / "pairs.jsonl", [{"prompt": prompt, "chosen": answer, "rejected": "4" * len(answer)}] * (2 * case.batch))
    text = case.program.format(**{k: getattr(case, k) for k in Case.__dataclass_fields__})
    program = folder / "run.rlf"
    program.write_text(f"cluster nodes=1 gpus={case.world}\n{text}\n{case.top}\n{case.place}\n")
    return compile(str(program))
