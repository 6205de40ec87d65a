"""What may be said of copies, what may not, and what a placement that does not fit is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rldsl.diag import Failure
from rldsl.graph import model as g
from rldsl.graph.build import build
from rldsl.placement.place import place_graph, placements_of
from rldsl.search import memory_check
from rldsl.source import SourceFile
from rldsl.syntax.parse import parse
from tests.checked import check_graph
from tests.compiler.graphs import at, on, ppo
from tests.memory.test_fit import followed, held, needs, wide

PROGRAM = """
use std.grpo (group_norm, grpo_free)
cluster nodes=1 gpus=4
data prompts = jsonl("p.jsonl", batch=4)
model actor = causal_lm("m"{adapters}) train adamw(lr=1e-3)
model judge = reward_model("j")
flow f(steps=2) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=2)
  score  = judge.score(gen)
  adv    = group_norm(score)
  actor.train(gen, loss=grpo_free(old=gen.logprobs, adv=adv))
}}
place actor.train on mesh(0:4) tp=4
{rules}
"""


def graph(rules: str, adapters: str = ""):
    return build(parse(SourceFile("p.rlf", PROGRAM.format(rules=rules, adapters=adapters))), {})


def test_copies_are_kept_unless_a_placement_says_otherwise() -> None:
    assert all(p.keep for p in placements_of(graph("")).values())
    said = placements_of(graph("place actor.generate on mesh(0:4) dp=4 keep=false"))
    assert [k for k, p in said.items() if not p.keep] == ["gen"]
    assert all(p.keep for p in placements_of(graph("place actor.generate on mesh(0:4) dp=4 keep=true")).values())
    assert not placements_of(graph("place actor.generate keep=false"))["gen"].keep, "where it runs is left as it is"


def test_one_layout_has_no_copies() -> None:
    """Under the layout that it is trained with, a call reads what is trained: nothing moves, and nothing is freed."""
    check_graph(graph("place actor.generate on mesh(0:4) tp=4 keep=false"))


@pytest.mark.parametrize("rules, code, under, adapters", [
    ("place actor.generate on mesh(0:4) dp=4 keep=1", "RL0311", "keep=1", ""),
    ("place actor.generate on mesh(0:4) dp=4 keep=2.5", "RL0311", "keep=2.5", ""),
    ("place actor.generate on mesh(0:4) dp=4 keep=false keep=true", "RL0311", "keep=true", ""),
    ("place actor.generate on mesh(0:4) dp=4 kept=false", "RL0310", "kept", ""),
    ("place @adv on mesh(0:4) keep=false", "RL0311", "keep=false", ""),
    ("place judge.* on mesh(0:4) dp=4 keep=false", "RL0322", "keep=false", ""),
    ("place @train on mesh(0:4) tp=4 keep=false", "RL0313", "@train", ""),
    ("place actor.generate on mesh(0:4) dp=4 keep=false", "RL0322", "keep=false", ", lora(r=4)"),
])
def test_mistakes(rules: str, code: str, under: str, adapters: str) -> None:
    with pytest.raises(Failure) as caught:
        check_graph(graph(rules, adapters))
    d = caught.value.diagnostics[0]
    assert d.code == code and d.span is not None and d.span.text == under and d.help


def test_what_is_trained_is_not_dropped() -> None:
    text = PROGRAM.replace("tp=4\n", "tp=4 keep=false\n").format(rules="", adapters="")
    with pytest.raises(Failure) as caught:
        check_graph(build(parse(SourceFile("p.rlf", text)), {}))
    (d,) = caught.value.diagnostics
    assert d.code == "RL0322" and "`actor.train`" in d.title and "generate" in d.help


def test_a_placement_that_does_not_fit_is_told_to_drop() -> None:
    """Where all that is milder is done, and the copy is what is too much while the actor is trained."""
    small = dict(mbs=1, recompute="full")
    real = {"gen": on(1, 0, 8, dp=4, pp=2, mbs=1), "score": on(2, 2, 4, pp=2, mbs=1),
            "ref_lp": on(3, 4, 8, pp=4, mbs=1), "v": on(4, 4, 8, dp=4, mbs=1),
            "critic.train": on(7, 4, 8, dp=4, **small), "actor.train": on(8, 0, 4, dp=4, **small)}

    def placed(memory: float, **more: bool):
        graph = ppo(real | {"gen": on(1, 0, 8, dp=4, pp=2, mbs=1, **more)}, cluster=g.Cluster(1, 8, memory, at(22)))
        frames = tuple(replace(f, max_prompt_tokens=16, max_response_tokens=256 if f.id == "gen" else 0)
                       for f in graph.frames)
        return place_graph(replace(graph, frames=frames), "", wide)

    most, least = needs(placed(80.0)), needs(placed(80.0, keep=False))
    assert least < most
    x = placed((least + (most - least) / 20) / 1e9)  # less than other mends need
    with pytest.raises(Failure) as caught:
        memory_check.check_memory(x, held(x))
    (d,) = caught.value.diagnostics
    assert d.code == "RL0401" and d.help.startswith('use --on "actor.generate keep=false", which needs ')
    assert followed(x, d) <= x.memory
