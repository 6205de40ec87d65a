"""Whole programs become the graphs that they mean."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from rldsl.diag import Failure
from rldsl.graph import model as g
from rldsl.graph.build import build
from rldsl.graph.picture import dot, edges, mermaid, text
from rldsl.plan.operators import OPERATORS
from rldsl.source import SourceFile
from rldsl.syntax.parse import parse

PPO = '''
use std.ppo (kl_rewards, gae, ppo_clip, value_clip)
param base = "models/sft"             # rlc compile ppo.rlf --set base=...
param lr   = 1e-6
cluster nodes=1 gpus=8                # or: cluster "h100x64.yaml"
data prompts = jsonl("data/prompts.jsonl", batch=512, max_prompt_tokens=256)
model actor  = causal_lm(base)           train adamw(lr=lr)
model critic = value_model(base)         train adamw(lr=5e-6)
model ref    = causal_lm(base)
model judge  = reward_model("models/rm")
flow ppo(steps=1000, seed=1) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, max_new_tokens=256)   on mesh(0:8) dp=4 pp=2
  score  = judge.score(gen)                             on mesh(2:4) pp=2
  ref_lp = ref.logprobs(gen)                            on mesh(4:8) pp=4
  v      = critic.values(gen)                           on mesh(0:2) dp=2
  r        = kl_rewards(score, gen.logprobs, ref_lp, coef=0.1)
  adv, ret = gae(r, v, gamma=1.0, lam=0.95)
  critic.train(gen, loss=value_clip(old=v, ret=ret), minibatches=4)                      on mesh(4:8) dp=2 pp=2
  actor.train(gen, loss=ppo_clip(old=gen.logprobs, adv=whiten(adv)), minibatches=4)      on mesh(0:4) dp=2 pp=2
  every 100 { save actor, critic }
}
'''
GRPO = '''
use std.grpo (group_norm, grpo)
use py "rewards.py" (exact_match: gen, prompt -> seq)
data prompts = jsonl("p.jsonl", batch=4, prompt="question")
model actor = causal_lm("m") train adamw(1e-4, schedule=cosine, warmup=0.1, betas=[0.9, 0.95])
model ref   = causal_lm("m")
mesh all = mesh(0:4)
place ref.* on all dp=4
flow run(steps=3) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=8, max_new_tokens=16, temperature=0.7, stop="\\n")
  ref_lp = ref.logprobs(gen)
  reward = exact_match(gen, prompt)
  adv    = group_norm(reward)
  metric reward = mean(reward)
  metric kl = mean(gen.logprobs - ref_lp)
  metric length = mean(len(gen))
  actor.train(gen, loss=grpo(old=gen.logprobs, adv=adv, ref=ref_lp, beta=0.01))
}
'''
SFT = '''
use std.sft (sft)
data pairs = jsonl("p.jsonl", batch=4, max_answer_tokens=8)
model m = causal_lm("m") train adamw(lr=1e-3)
flow f(steps=2) {
  batch = pairs.next()
  m.train(batch, loss=sft())
}
'''
DPO = '''
use std.dpo (dpo)
data prefs = jsonl("p.jsonl", batch=4)
model m = causal_lm("m") train adamw(lr=1e-3)
model ref = causal_lm("m")
flow f(steps=2) {
  pair = prefs.next()
  c = ref.logprobs(pair.chosen)
  m.train(pair.chosen, pair.rejected, loss=dpo(ref_chosen=c, ref_rejected=ref.logprobs(pair.rejected)))
}
'''
GENERATE = '''
data d = jsonl("p.jsonl", batch=2)
model m = causal_lm("m", dtype="bfloat16")
flow f(steps=1, seed=7) {
  p = d.next()
  o = m.generate(p, greedy=true, max_new_tokens=4)
  metric finished = mean(o.finished)
}
'''
FILES = {"rewards.py": "def exact_match(row):\n    return 1.0\n"}


def read(path: str) -> str:
    if path not in FILES:
        raise FileNotFoundError(2, "No such file or directory", path)
    return FILES[path]


def graph(source: str, **sets: object) -> g.Graph:
    return build(parse(SourceFile("main.rlf", source)), sets, read=read)


def node(made: g.Graph, id_: str) -> g.Node:
    return next(n for n in g.nodes(made.items) if n.id == id_)


def test_ppo_page_of_the_design() -> None:
    made = graph(PPO, lr="2e-6")
    assert [n.id for n in g.nodes(made.items)] == ["prompt", "gen", "score", "ref_lp", "v", "r", "adv", "critic.train",
                                                 "expr#1", "actor.train", "actor.save", "critic.save"]
    assert dict(made.params) == {"base": "models/sft", "lr": 2e-6}
    assert made.models[0].optimizer is not None and made.models[0].optimizer.lr == 2e-6
    train = node(made, "actor.train")
    assert isinstance(train, g.Train)
    assert train.model_outputs == (("logprobs", "gen", "logprobs"),)
    assert dict(train.data_inputs) == {"old": "gen.logprobs", "adv": "expr#1"}
    assert [m for m, _ in train.outputs] == ["loss", "grad_norm", "lr", "clip_frac", "kl"]
    assert train.minibatches == 4 and train.shuffle and train.call == 0
    assert node(made, "adv").writes == ("adv", "ret")
    assert train.clause is not None and train.clause.mesh is not None and train.clause.mesh.devices == (0, 4)
    assert [p for p, _ in made.sources] == ["main.rlf", "std/ppo.rlf", "std/policy.rlf", "std/prelude.rlf"]


def test_train_calls_of_one_model_are_numbered() -> None:
    """So two of them do not make the same minibatches; those of two models may share theirs."""
    line = next(x for x in PPO.splitlines() if x.strip().startswith("actor.train"))
    made = graph(PPO.replace(line, f"{line}\n{line}"))
    calls = {n.id: n.call for n in g.nodes(made.items) if isinstance(n, g.Train)}
    assert calls == {"critic.train": 0, "actor.train": 0, "actor.train#2": 1}


def test_every_program_uses_only_the_operators_of_the_plan_and_reads_what_exists() -> None:
    for source in (PPO, GRPO, SFT, DPO, GENERATE):
        made = graph(source)
        for p in made.programs:
            assert {n.op for n in p.nodes} <= OPERATORS.keys()
            assert all(a < i for i, n in enumerate(p.nodes) for a in n.args)
        values = {v.id for v in made.values}
        assert len(values) == len(made.values)
        seen: set[str] = set()
        for n in g.nodes(made.items):
            assert set(n.reads) <= seen
            seen |= set(n.writes)
        assert seen <= values and {v for _, v in made.metrics} <= seen


def test_grpo_frames_functions_and_columns() -> None:
    made = graph(GRPO)
    prompt, gen = made.frames
    assert (gen.count, gen.per_prompt, gen.prompt_space, gen.row_space) == (32, 8, prompt.prompt_space, "gen")
    assert gen.temperature == 0.7 and gen.max_response_tokens == 16 and prompt.max_prompt_tokens == 512
    [function] = made.functions
    assert function.path == "rewards.py"
    assert function.sha256 == hashlib.sha256(FILES["rewards.py"].encode()).hexdigest()
    assert node(made, "reward").reads == ("gen.tokens", "prompt.columns")
    assert dict(made.data[0].options)["prompt"] == "question" and made.data[0].row_format == "prompts"
    infer = node(made, "ref_lp")
    assert isinstance(infer, g.Infer) and infer.temperature == 0.7
    assert made.rules[0].selector == "ref.*"
    assert [m for m, _ in made.metrics][:3] == ["reward", "kl", "length"]
    assert made.models[0].optimizer is not None and made.models[0].optimizer.schedule == "cosine"
    loss = next(p for p in made.programs if p.id == "actor.train/grpo")
    adv = next(n for n in loss.nodes if n.attr("name") == "adv")
    assert (adv.level, adv.space) == ("seq", "gen")  # widened inside the program


def test_sft_takes_answers_and_dpo_takes_pairs() -> None:
    sft, dpo = graph(SFT), graph(DPO)
    assert sft.data[0].row_format == "answers" and sft.frames[0].max_response_tokens == 8
    assert dpo.data[0].row_format == "pairs"
    assert [(f.id, f.row_space, f.prompt_space) for f in dpo.frames] == [("pair.chosen", "pair", "pair"),
                                                               ("pair.rejected", "pair", "pair")]
    train = node(dpo, "m.train")
    assert isinstance(train, g.Train)
    assert train.model_outputs == (("chosen", "pair.chosen", "logprobs"), ("rejected", "pair.rejected", "logprobs"))
    assert dict(train.data_inputs) == {"ref_chosen": "c", "ref_rejected": "expr#1"}


def test_generation_only() -> None:
    made = graph(GENERATE)
    generate = node(made, "o")
    assert isinstance(generate, g.Generate) and generate.sampling.greedy
    assert made.frames[1].temperature == 1.0 and made.models[0].dtype == "bfloat16" and made.seed == 7


def test_placement_file_adds_meshes_and_rules_only() -> None:
    good = parse(SourceFile("p.rlf", "cluster nodes=2 gpus=4\nmesh half = mesh(0:2, 0:4)\nplace m.* on half dp=2\n"))
    made = build(parse(SourceFile("main.rlf", SFT)), {}, good, read)
    assert made.cluster is not None and made.cluster.nodes == 2
    assert made.rules[0].clause.mesh is not None and made.rules[0].clause.mesh.nodes == (0, 2)
    bad = parse(SourceFile("p.rlf", 'model x = causal_lm("m")\n'))
    with pytest.raises(Failure) as caught:
        build(parse(SourceFile("main.rlf", SFT)), {}, bad, read)
    assert [d.code for d in caught.value.diagnostics] == ["RL0108"]


def test_pictures_name_every_node_and_dash_versions() -> None:
    made = graph(PPO)
    names = {n.id: n.label or n.id if isinstance(n, g.Compute) else n.id for n in g.nodes(made.items)}
    assert all(name in picture for picture in (mermaid(made), dot(made)) for name in names.values())
    assert all(id in text(made) for id in names)
    assert names["expr#1"] == "whiten(adv) (main.rlf:20)" and "expr#" not in mermaid(made)
    assert ("actor.train", "gen", "actor", True) in edges(made)  # the version of the step before
    assert ("r", "adv", "r", False) in edges(made)
    assert "-.->" in mermaid(made) and "style=dashed" in dot(made)


def test_library_compiles_from_its_text() -> None:
    from rldsl.semantics.modules import library

    for name in library():
        source = (Path(__file__).parents[2] / "stdlib" / f"{name}.rlf").read_text()
        made = build(parse(SourceFile(f"{name}.rlf", source + GENERATE)), {}, read=read)  # bodies checked alone
        assert made.flow == "f"
        decls = [i for i in parse(SourceFile(name, source)).items if hasattr(i, "doc")]
        assert decls and all(d.doc for d in decls)
