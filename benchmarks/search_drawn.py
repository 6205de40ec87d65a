"""The gap of placement search over drawn programs, models and clusters, so that nothing is tuned to one of them.

    python -m benchmarks.search_drawn [cases] [seed]    # 48 cases, half an hour of CPU

A case is an algorithm (PPO, GRPO, ReMax, DPO, PPO with a lag, GRPO of a mixture of experts), a model of 0.3B to 90B,
one to 32 nodes of one to eight devices, their memory, the speed of the network, the batch and the expected lengths. Of
each, the search is complete: what it finds is compiled, simulated and verified. Prints the gap between the simulated
step and the proven bound (gate 2 %), why the search ended, and whether any alternative that the answer lists is faster
than the answer (gate: none). Where nothing fits, the case says so and does not count.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from benchmarks.scale import directory
from rldsl import api
from rldsl.clusters import Cluster, preset
from rldsl.diag import Failure
from rldsl.models.families import describe
from rldsl.search import Options, find_placement, prepare_program, unless_locked
from rldsl.search.answer import Answer
from rldsl.search.answer_text import end_text
from rldsl.simulate import Lengths
from rldsl.source import SourceFile

CASES = 48
GATE = 0.02
HEADER = """
cluster nodes={nodes} gpus={gpus}
model actor = causal_lm("actor", dtype="bfloat16") train adamw(lr=1e-6)
"""
PROMPTS = 'data prompts = jsonl("p.jsonl", batch={batch}, max_prompt_tokens={prompt})\n'
REF = 'model ref = causal_lm("actor", dtype="bfloat16")\n'
JUDGE = 'model judge = reward_model("judge", dtype="bfloat16")\n'
PPO = HEADER + PROMPTS + REF + JUDGE + """
use std.ppo (kl_rewards, gae, ppo_clip, value_clip)
model critic = value_model("actor", dtype="bfloat16") train adamw(lr=5e-6)
flow ppo(steps=10, seed=1) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, max_new_tokens={response})
  score  = judge.score(gen)
  ref_lp = ref.logprobs(gen)
  v      = critic.values(gen)
  r        = kl_rewards(score, gen.logprobs, ref_lp, coef=0.1)
  adv, ret = gae(r, v, gamma=1.0, lam=0.95)
  critic.train(gen, loss=value_clip(old=v, ret=ret), minibatches=4)
  actor.train(gen, loss=ppo_clip(old=gen.logprobs, adv=whiten(adv)), minibatches=4)
}}
"""
GRPO = HEADER + PROMPTS + REF + JUDGE + """
use std.grpo (group_norm, grpo)
flow grpo(steps=10, seed=1) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=4, max_new_tokens={response})
  score  = judge.score(gen)
  ref_lp = ref.logprobs(gen)
  actor.train(gen, loss=grpo(old=gen.logprobs, adv=group_norm(score), ref=ref_lp, beta=0.04), minibatches=2)
}}
"""
REMAX = HEADER + PROMPTS + JUDGE + """
use std.remax (over_greedy)
use std.rloo (reinforce)
flow remax(steps=10, seed=1) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, max_new_tokens={response})
  best   = actor.generate(prompt, max_new_tokens={response}, greedy=true)
  actor.train(gen, loss=reinforce(adv=over_greedy(judge.score(gen), judge.score(best))), minibatches=2)
}}
"""
DPO = HEADER + REF + """
use std.dpo (dpo)
data pairs = jsonl("p.jsonl", batch={batch}, max_prompt_tokens={prompt}, max_answer_tokens={response})
flow dpo(steps=10, seed=1) {{
  pair         = pairs.next()
  ref_chosen   = ref.logprobs(pair.chosen)
  ref_rejected = ref.logprobs(pair.rejected)
  actor.train(pair.chosen, pair.rejected, loss=dpo(ref_chosen=ref_chosen, ref_rejected=ref_rejected, beta=0.1))
}}
"""
PROGRAMS = {"ppo": PPO, "grpo": GRPO, "remax": REMAX, "dpo": DPO, "ppo lag=1": PPO.replace("seed=1", "seed=1, lag=1"),
            "moe grpo": GRPO}
WIDTHS = ((1024, 16), (1536, 24), (2048, 28), (3072, 28), (4096, 32), (5120, 40), (6656, 60), (8192, 80))


@dataclass(frozen=True, slots=True)
class Case:
    """One drawn problem."""

    program: str  # a key of `PROGRAMS`
    sizes: dict[str, object]  # of the models' configuration
    cluster: Cluster  # to place on
    batch: int  # rows of data per step
    prompt: int  # tokens of a prompt, at most
    response: int  # tokens of a response, at most
    lengths: Lengths  # that are expected

    @property
    def text(self) -> str:
        c, mean = self.cluster, f" ({self.lengths.response:.0f})" if self.lengths.response else ""
        return (f"{self.program:<9} {self.sizes['hidden_size']:>5}x{self.sizes['num_hidden_layers']:<3} "
                f"{c.nodes:>2}x{c.gpus} of {c.memory_gb:>3.0f} GB, {c.network_gb_s:>3.0f} GB/s, {self.batch:>4} x "
                f"({self.prompt}+{self.response}{mean})")


def draw_case(seed: int, number: int) -> Case:
    """Every program comes up equally often."""
    draw = random.Random(f"{seed}/{number}")
    program = list(PROGRAMS)[number % len(PROGRAMS)]
    hidden, layers = draw.choice(WIDTHS)
    heads = hidden // draw.choice((64, 128))
    kv = draw.choice([k for k in (1, 2, 4, 8, heads) if heads % k == 0])
    sizes = dict(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv,
                 intermediate_size=hidden * draw.choice((5, 7, 8, 11)) // 2, vocab_size=draw.choice((32000, 128256)),
                 max_position_embeddings=32768, tie_word_embeddings=hidden < 2048)
    if program == "moe grpo":
        sizes |= dict(num_local_experts=draw.choice((8, 16)), num_experts_per_tok=2, tie_word_embeddings=False,
                      hidden_size=(small := min(hidden, 4096)), num_attention_heads=small // 128,
                      num_key_value_heads=draw.choice((4, 8)), intermediate_size=small * 2)
    machine = preset("h100x8")
    assert machine is not None
    nodes, gpus = draw.choice((1, 1, 2, 3, 4, 6, 8, 16, 32)), draw.choice((1, 2, 4, 8, 8))
    cluster = replace(machine, nodes=nodes, gpus=gpus, memory_gb=draw.choice((22.0, 40.0, 80.0, 141.0)),
                      network_gb_s=draw.choice((5.0, 25.0, 50.0, 400.0)))
    response = draw.choice((256, 1024, 4096, 12288))
    mean = draw.choice((0.0, 0.0, response / 2, response / 4))
    return Case(program, sizes, cluster, draw.choice((64, 128, 512, 1024)), draw.choice((128, 512, 1024)), response,
                Lengths(0.0, mean))


def answer(case: Case, folder: Path) -> Answer | None:
    """None where nothing fits."""
    family = "mixtral" if "num_local_experts" in case.sizes else "llama"
    directory(folder / "actor", family, case.sizes, False)
    directory(folder / "judge", family, case.sizes, True)
    known = cache(lambda path, kind, span=None, trained=False: describe(str(folder / path), kind, span, trained))
    text = PROGRAMS[case.program].format(nodes=case.cluster.nodes, gpus=case.cluster.gpus, batch=case.batch,
                                         prompt=case.prompt, response=case.response)
    graph = api.build_graph(SourceFile("case.rlf", text))
    memory = int(case.cluster.memory_gb * 1e9)
    p = prepare_program(graph, "", case.cluster, memory, unless_locked(graph, ()), known)
    try:
        return find_placement(p, case.cluster, memory, Options(lengths=case.lengths))
    except Failure as e:
        if e.diagnostics[0].code != "RL0402":
            raise
        return None


def faster_alternatives(a: Answer) -> int:
    """How many of the placements that the answer lists are faster than it: compiled ones, and neighbors that the
    estimate calls faster and nothing has refuted."""
    best = a.best[0]
    compiled = sum(other.seconds < best.seconds for other in a.best)
    neighbor = a.evaluator.fastest_neighbor(a.evaluator.free_neighbors(best.evaluation.assignment),
                                            best.evaluation.seconds, a.outcomes)
    return compiled + (neighbor is not None)


def lines(count: int, seed: int) -> Iterator[str]:
    gaps, worse = [], 0
    for number in range(count):
        case = draw_case(seed, number)
        begin = time.process_time()
        with tempfile.TemporaryDirectory() as place:
            found = answer(case, Path(place))
        cpu = time.process_time() - begin
        if found is None:
            yield f"{number:>3}  {case.text}: nothing fits ({cpu:.1f} s)"
            continue
        gaps.append(found.gap)
        worse += (faster := faster_alternatives(found))
        yield (f"{number:>3}  {case.text}: {found.best[0].seconds:.4g} s, gap {found.gap:.2%}, "
               f"{found.result.num_nodes} nodes ({cpu:.1f} s), {end_text(found)}"
               + (f", {faster} ALTERNATIVES FASTER" if faster else ""))
    if gaps:
        over = sum(x > GATE for x in gaps)
        yield (f"{len(gaps)} of {count} cases fit: largest gap {max(gaps):.2%} (gate {GATE:.0%}, {over} over), "
               f"{worse} listed alternatives faster than the answer (gate 0)")


def main() -> None:
    count, seed = (int(sys.argv[k]) if len(sys.argv) > k else default for k, default in ((1, CASES), (2, 0)))
    for line in lines(count, seed):
        print(line, flush=True)


if __name__ == "__main__":
    main()
