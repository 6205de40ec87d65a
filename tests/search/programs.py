"""Programs of four algorithms, models of known shapes without files, and instances of the search made of them."""

from __future__ import annotations

from dataclasses import replace

from rldsl import api
from rldsl.clusters import Cluster, preset
from rldsl.graph.model import Graph
from rldsl.models.families import Family
from rldsl.plan.model import ParamSpec, Split
from rldsl.search import PreparedProgram, prepare_program, unless_locked
from rldsl.search.evaluator import Evaluator
from rldsl.search.problem import build_problem
from rldsl.simulate import Lengths
from rldsl.source import SourceFile

HEAD = """cluster nodes=1 gpus=1
param batch = 256
param tokens = 512
param n = 4
"""
PROMPTS = 'data prompts = jsonl("p.jsonl", batch=batch, max_prompt_tokens=256)\n'
ACTOR = 'model actor = causal_lm("actor", dtype="bfloat16") train adamw(lr=1e-6)\n'
REF = 'model ref = causal_lm("actor", dtype="bfloat16")\n'
JUDGE = 'model judge = reward_model("judge", dtype="bfloat16")\n'
PPO = HEAD + "use std.ppo (kl_rewards, gae, ppo_clip, value_clip)\n" + PROMPTS + ACTOR + REF + JUDGE + """
model critic = value_model("critic", dtype="bfloat16") train adamw(lr=5e-6)
flow ppo(steps=10, seed=1) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, max_new_tokens=tokens)
  score  = judge.score(gen)
  ref_lp = ref.logprobs(gen)
  v      = critic.values(gen)
  r        = kl_rewards(score, gen.logprobs, ref_lp, coef=0.1)
  adv, ret = gae(r, v, gamma=1.0, lam=0.95)
  critic.train(gen, loss=value_clip(old=v, ret=ret), minibatches=4)
  actor.train(gen, loss=ppo_clip(old=gen.logprobs, adv=whiten(adv)), minibatches=4)
}
"""
GRPO = HEAD + "use std.grpo (group_norm, grpo)\n" + PROMPTS + ACTOR + REF + JUDGE + """
flow grpo(steps=10, seed=1) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=n, max_new_tokens=tokens)
  score  = judge.score(gen)
  ref_lp = ref.logprobs(gen)
  actor.train(gen, loss=grpo(old=gen.logprobs, adv=group_norm(score), ref=ref_lp, beta=0.04), minibatches=4)
}
"""
REMAX = HEAD + "use std.remax (over_greedy)\nuse std.rloo (reinforce)\n" + PROMPTS + ACTOR + JUDGE + """
flow remax(steps=10, seed=1) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, max_new_tokens=tokens)
  best   = actor.generate(prompt, max_new_tokens=tokens, greedy=true)
  actor.train(gen, loss=reinforce(adv=over_greedy(judge.score(gen), judge.score(best))), minibatches=2)
}
"""
DPO = HEAD + "use std.dpo (dpo)\n" + ACTOR + REF + """
data pairs = jsonl("p.jsonl", batch=batch, max_prompt_tokens=256, max_answer_tokens=tokens)
flow dpo(steps=10, seed=1) {
  pair         = pairs.next()
  ref_chosen   = ref.logprobs(pair.chosen)
  ref_rejected = ref.logprobs(pair.rejected)
  actor.train(pair.chosen, pair.rejected, loss=dpo(ref_chosen=ref_chosen, ref_rejected=ref_rejected, beta=0.1))
}
"""
PROGRAMS = {"ppo": PPO, "grpo": GRPO, "remax": REMAX, "dpo": DPO,
            "ppo lag=1": PPO.replace("seed=1", "seed=1, lag=1"), "grpo lag=2": GRPO.replace("seed=1", "seed=1, lag=2")}

# hidden, layers, heads, key-value heads, inner width, vocabulary
SHAPES = {"0.5B": (896, 24, 14, 2, 4864, 151936), "1B": (2048, 16, 32, 8, 8192, 128256),
          "7B": (4096, 32, 32, 8, 14336, 128256), "70B": (8192, 80, 64, 8, 28672, 128256)}


def family(size: str, path: str, kind: str) -> Family:
    """A dense model of Llama's form."""
    h, layers, heads, kv, inner, vocab = SHAPES[size]
    head = h // heads

    def layer(name: str, shape: tuple[int, ...], style: str = "", units: int = 0) -> ParamSpec:
        split = Split(0 if style == "colwise" else 1, ((units, shape[0 if style == "colwise" else 1] // units),)) \
            if style else None
        return ParamSpec(f"model.layers.{{}}.{name}", shape, "layer", layers, split, style or "replicated")

    ends = (ParamSpec("lm_head.weight", (vocab, h), "last", 0, Split(0, ((vocab, 1),)), "head") if kind == "causal_lm"
            else ParamSpec("score.weight", (1, h), "last"))
    params = (ParamSpec("model.embed_tokens.weight", (vocab, h), "first", 0, Split(0, ((vocab, 1),)), "vocab"),
              layer("self_attn.q_proj.weight", (h, h), "colwise", heads),
              layer("self_attn.k_proj.weight", (kv * head, h), "colwise", kv),
              layer("self_attn.v_proj.weight", (kv * head, h), "colwise", kv),
              layer("self_attn.o_proj.weight", (h, h), "rowwise", heads),
              layer("mlp.gate_proj.weight", (inner, h), "colwise", inner),
              layer("mlp.up_proj.weight", (inner, h), "colwise", inner),
              layer("mlp.down_proj.weight", (h, inner), "rowwise", inner),
              layer("input_layernorm.weight", (h,)), layer("post_attention_layernorm.weight", (h,)),
              ParamSpec("model.norm.weight", (h,), "last"), ends)
    return Family("llama", path, kind, params, layers, heads, kv, h, head, inner, vocab, 8192, 2, size * 8, "t")


def describe(size: str):
    return lambda path, kind, span=None, trained=False: family(size, path, kind)


def graph(name: str, text: str = "", **sets) -> Graph:
    """text: of the program, in place of the one of that name."""
    return api.build_graph(SourceFile(f"{name}.rlf", text or PROGRAMS[name]), sets)


def cluster(nodes: int, gpus: int, memory_gb: float = 80.0, **other) -> Cluster:
    """Of H100s."""
    found = preset("h100x8")
    assert found is not None
    return replace(found, nodes=nodes, gpus=gpus, memory_gb=memory_gb, name=f"{nodes}x{gpus}", **other)


def ready(name: str, size: str, machines: Cluster, locks: tuple[str, ...] = (), text: str = "",
          **sets) -> PreparedProgram:
    made = graph(name, text, **sets)
    memory = int(machines.memory_gb * 1e9)
    return prepare_program(made, "", machines, memory, unless_locked(made, api.read_selectors(locks)), describe(size))


def instance(name: str, size: str, machines: Cluster, lengths: Lengths = Lengths(), **sets) -> Evaluator:
    p = ready(name, size, machines, **sets)
    return Evaluator(build_problem(p.placed, machines, lengths, p.placed.memory, p.fixed))
