"""Generation ahead inside `repeat ... until`, `every`, `first` and `after`: the same numbers as a plain loop, on every
placement, and after a stop at any step."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from itertools import combinations
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rldsl import api
from rldsl.diag import Failure
from rldsl.plan.events import (
    EVERY_ITERATION,
    Compute,
    Event,
    Generate,
    Lookup,
    Loop,
    Train,
    Transfer,
    When,
    aheads_in,
    split_buffer,
)
from rldsl.plan.model import Plan
from rldsl.plan.projection import event_paths
from rldsl.verify import verify
from tests.checkpoint.runs import attempt, copy_first_steps, held, lines
from tests.checkpoint.runs import run as run_plan
from tests.end_to_end import reference
from tests.end_to_end.programs import Metrics, compile_program, run_program
from tests.end_to_end.test_invariance import HERE, compare, placement
from tests.end_to_end.test_reference import program, samples
from tests.lag.test_reference import assert_equal_weights, optimizer, stepped, surrogate
from tests.tiny import make_all, make_model, make_sums, write_jsonl

STEPS, N, BATCH, WANTED = 6, 3, 3, 9
DYNAMIC = '''
use std.grpo (group_norm, grpo_free)
use py "{functions}" (digits: gen -> seq)
param base = "models/sft"
param rows = "data/prompts.jsonl"
data prompts = jsonl(rows, batch=3, max_prompt_tokens=16)
model actor = causal_lm(base{options}) train adamw(lr=2e-3, eps=1e-4, clip_grad=0)
flow dapo(steps=6, seed=3, lag={lag}) {{
  repeat {{
    prompt = prompts.next()
    gen    = actor.generate(prompt, n=3, max_new_tokens=6)
    reward = digits(gen)
    kept   = gen where std(reward by prompt) > 0.55
  }} until count(kept) >= 9 max 4
  actor.train(kept, loss=grpo_free(old=kept.logprobs, adv=group_norm(reward)))
  metric asked = count(gen)
  metric kept  = count(kept)
  metric age   = max(kept.version)
  {last}
}}
'''
# blocks that run in some steps, one inside another, and with a repeat in it; generation above and below training, and
# from a buffer; rewards below the repeat, and generation in some of its iterations
SELDOM = '''
use std.sft (sft)
use std.grpo (group_norm, grpo_free)
use py "{functions}" (digits: gen -> seq)
param base = "models/sft"
param rows = "data/prompts.jsonl"
data prompts = jsonl(rows, batch=2, max_prompt_tokens=16)
data others  = jsonl(rows, batch=2, max_prompt_tokens=16)
model actor = causal_lm(base) train adamw(lr=2e-3, eps=1e-4)
model slow  = causal_lm(base)
buffer good = rows(capacity=8)
flow seldom(steps=6, seed=3, lag={lag}) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=2, max_new_tokens=4)
  actor.train(gen, loss=grpo_free(old=gen.logprobs, adv=group_norm(digits(gen))))
  every 2 {{
    more  = prompts.next()
    tries = actor.generate(more, n=2, max_new_tokens=4)
    actor.train(tries, loss=sft())
    below = slow.generate(more, max_new_tokens=3)
    metric right = mean(digits(tries))
    metric late  = mean(abs(actor.logprobs(tries) - tries.logprobs))
    metric slow  = mean(below.logprobs)
    past  = good.sample(3)
    again = slow.generate(past, max_new_tokens=3)
    metric again = mean(again.logprobs)
    good.add(tries)
    sync slow from actor
  }}
  after 1 {{
    every 3 {{
      repeat {{
        o = others.next()
        t = actor.generate(o, n=2, max_new_tokens=4)
        k = t where digits(t) > 0
        every 2 {{
          second = others.next()
          extra  = actor.generate(second, max_new_tokens=2)
        }}
      }} until count(k) >= 5 and mean(len(t)) > 0 max 3
      actor.train(k, loss=sft())
      metric asked = count(t)
      metric found = mean(digits(k)) - mean(digits(t))
    }}
  }}
  first 2 {{
    e     = others.next()
    early = actor.generate(e, max_new_tokens=3)
    metric early = mean(early.logprobs)
  }}
  metric reward = mean(digits(gen))
  {last}
}}
'''
ALONE = "cluster nodes=1 gpus=1\nplace *.* on mesh(0:1)\n"
PLACES = {
    "apart": placement(4, actor_generate="on mesh(0:2) dp=2", slow_generate="on mesh(0:2) dp=2",
                       actor_train="on mesh(2:4) tp=2", actor_logprobs="on mesh(2:4) dp=2"),
    "pipelines": placement(3 + 1, actor_generate="on mesh(2:4) pp=2 keep=false", slow_generate="on mesh(3:4)",
                           actor_train="on mesh(0:2) dp=2 zero=2", actor_logprobs="on mesh(0:1)"),
    "together": "cluster nodes=1 gpus=2\nplace *.* on mesh(0:2) dp=2\n",
}


def for_models(place: str, text: str) -> str:
    """The rules of a placement for the calls that a program has."""
    def fits(rule: str) -> bool:
        return not rule.startswith("place ") or rule.startswith("place *") or f"{rule.split()[1]}(" in text

    return "".join(f"{rule}\n" for rule in place.splitlines() if fits(rule))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_all(tmp_path_factory.mktemp("tiny"), tie_word_embeddings=True, num_hidden_layers=2)


def run(tiny: Path, folder: Path, text: str, place: str, like: Metrics | None = None) -> Metrics:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rewards_small.py").write_text((HERE / "rewards_small.py").read_text())
    (folder / "blocks.rlf").write_text(text)
    sets = {"base": str(tiny / "models/sft"), "rows": str(tiny / "data/prompts.jsonl")}
    return run_program(folder / "blocks.rlf", sets, folder, for_models(place, text), like=like)


def filled(text: str, lag: int, functions: str = "rewards_small.py", options: str = "", last: str = "") -> str:
    return text.format(lag=lag, functions=functions, options=options, last=last)


@pytest.mark.thorough
@pytest.mark.parametrize(("text", "lag", "places"), [
    (DYNAMIC, 2, ("apart", "pipelines")), (SELDOM, 1, ("pipelines",)), (SELDOM, 2, ("apart", "together"))],
    ids=["dynamic", "seldom", "older"])
def test_programs_are_the_same_on_every_placement(text: str, lag: int, places: tuple[str, ...], tiny: Path,
                                                  tmp_path: Path) -> None:
    one = run(tiny, tmp_path / "one", filled(text, lag), ALONE)
    asked = {line["asked"] for line in one if "asked" in line}
    assert len(asked) > (text == DYNAMIC), "each loop makes as many iterations"
    for name in places:
        compare(run(tiny, tmp_path / name, filled(text, lag), PLACES[name], one), one)


@pytest.mark.thorough
def test_with_the_same_bits(tmp_path: Path) -> None:
    """With `invariant=training`: metrics and parameters after the last step."""
    model = make_model(tmp_path / "m", tie_word_embeddings=True, num_hidden_layers=2)
    write_jsonl(tmp_path / "rows.jsonl", make_sums(32))
    found = []
    for i, place in enumerate((ALONE, PLACES["apart"])):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "rewards_small.py").write_text((HERE / "rewards_small.py").read_text())
        (folder / "blocks.rlf").write_text(
            filled(DYNAMIC, 1, options=", invariant=training", last="every 6 { save actor }"))
        metrics = run_program(folder / "blocks.rlf", {"base": str(model), "rows": str(tmp_path / "rows.jsonl")}, folder,
                              for_models(place, DYNAMIC))
        assert [line["age"] for line in metrics] == [1] * 6
        saved = {n: x for file in folder.rglob("*.safetensors") for n, x in load_file(file).items()}
        found.append((metrics, sha256(b"".join(saved[n].view(torch.uint8).numpy().tobytes()
                                               for n in sorted(saved))).hexdigest()))
    assert found[0] == found[1]


@pytest.mark.thorough
@pytest.mark.parametrize("lag", [1, 2])
def test_dynamic_sampling_is_a_plain_loop(lag: int, tiny: Path, tmp_path: Path) -> None:
    """From the definition: batches are drawn from the policy after step s - 1 - lag until enough prompts are useful,
    then the policy is trained on these."""
    record = tmp_path / "samples.jsonl"
    last = f'every {STEPS} {{ save actor to "{tmp_path / "after"}" }}'
    text = filled(DYNAMIC, lag, "recorder.py", last=last).replace('"models/sft"', f'"{tiny / "models/sft"}"').replace(
        '"data/prompts.jsonl"', f'"{tiny / "data/prompts.jsonl"}"')
    metrics = run_program(program(tmp_path, "dynamic", text, record), {}, tmp_path / "run", ALONE)
    drawn = iter(samples(record))
    actor = reference.causal_lm(tiny / "models/sft")
    adamw, versions, iterations = optimizer(actor), [copy.deepcopy(actor)], []
    for number in range(STEPS):
        behaviour, kept, asked = versions[max(0, number - lag)], list[tuple[reference.Sample, float]](), 0
        while asked < 4 * BATCH * N and len(kept) < WANTED:
            for _ in range(BATCH):
                group = [next(drawn) for _ in range(N)]
                asked += N
                rewards = torch.tensor([s.reward for s in group])
                if rewards.std() > 0.55:
                    kept += zip(group, ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist(), strict=True)
        iterations.append(asked)
        terms, gap = [], 0.0
        for sample, advantage in kept:
            with torch.no_grad():
                old = reference.response_logprobs(behaviour, sample)
            new = reference.response_logprobs(actor, sample)
            gap += float((new.detach() - old).abs().sum())
            terms.append(surrogate(new, old, torch.tensor(advantage)).mean())
        assert (gap > 0) == (number > 0), "the policy has moved on since it sampled"
        loss = stepped(adamw, torch.stack(terms).mean())
        assert metrics[number]["actor/loss"] == pytest.approx(loss, abs=2e-5), f"step {number + 1}"
        assert (metrics[number]["asked"], metrics[number]["kept"]) == (asked, len(kept)), f"step {number + 1}"
        versions.append(copy.deepcopy(actor))
    assert len(set(iterations)) > 1 and next(drawn, None) is None
    assert_equal_weights(actor, tmp_path / "after")


# ------------------------------------------------------------------------------------------------------- resume


@pytest.fixture(scope="module")
def base(tiny: Path) -> Iterator[Path]:
    (tiny / "rewards_small.py").write_text((HERE / "rewards_small.py").read_text())
    before = os.getcwd()
    os.chdir(tiny)
    yield tiny
    os.chdir(before)


def plan(base: Path, name: str, text: str, place: str) -> bytes:
    (base / f"{name}.rlf").write_text(text)
    folder = base / "plans" / f"{name}-{sha256(place.encode()).hexdigest()[:8]}"
    folder.mkdir(parents=True, exist_ok=True)
    return compile_program(base / f"{name}.rlf", {}, for_models(place, text), folder)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "text", "lag", "stops"), [
    ("dynamic", DYNAMIC, 1, (4,)), ("seldom", SELDOM, 2, (2, 4))])
def test_a_stopped_run_resumes(name: str, text: str, lag: int, stops: tuple[int, ...], base: Path) -> None:
    """As if nothing had happened; under another placement, to the same numbers."""
    full = filled(text, lag, last="checkpoint every 1 keep=9")
    data, one = plan(base, name, full, PLACES["together"]), plan(base, name, full, ALONE)
    whole = base / f"{name}-whole"
    assert set(run_plan(data, whole)) == {""}
    stopped = base / f"{name}-stopped"
    assert set(run_plan(data, stopped, stop_after=stops[-1])) == {""} and len(lines(stopped)) == stops[-1]
    for after in stops:
        out = base / f"{name}-{after}"
        copy_first_steps(stopped, out, after)
        assert set(run_plan(data, out, resume=out)) == {""}
        assert lines(out) == lines(whole), after
        found, expected = (held(x / "checkpoints/step-000006") for x in (out, whole))
        assert found.keys() == expected.keys() and all(found[k].equal(expected[k]) for k in found), after
    moved = base / f"{name}-moved"
    assert set(run_plan(data, moved, stop_after=stops[-1], like=whole)) == {""}
    assert set(run_plan(one, moved, resume=moved, like=whole)) == {""}
    for mine, theirs in zip(lines(moved), lines(whole), strict=True):
        assert mine == pytest.approx(theirs, rel=2e-4, abs=2e-5)


def kills(base: Path, count: int) -> list[str]:
    """What differs after runs that are killed at some moment, and resumed. Also `python -m tests.lag.test_blocks`."""
    found = []
    for name, text, lag in (("dynamic", DYNAMIC, 1), ("seldom", SELDOM, 2)):
        full = filled(text, lag, last="checkpoint every 1 keep=9")
        data = plan(base, name, full, PLACES["together"])
        whole = base / f"killed-{name}-whole"
        assert set(run_plan(data, whole)) == {""}
        for i in range(count):
            out = base / f"killed-{name}-{i}"
            attempt(data, out, 1 + i % 4, 0.01 + 0.07 * (i % 7), i % 2)
            codes = set(run_plan(data, out, resume=out, again=True))
            same = codes == {""} and lines(out) == lines(whole)
            last = [held(x / "checkpoints/step-000006") for x in (out, whole)] if same else []
            if not same or any(not last[0][k].equal(last[1][k]) for k in last[1]):
                found.append(f"{name} {i}: {codes}")
    return found


@pytest.mark.thorough
def test_killed_runs_resume(base: Path) -> None:
    assert not kills(base, 1)


# ------------------------------------------------------------------------------------------------------- plans


def compiled(base: Path, text: str, lag: int, place: str) -> Plan:
    (base / "compiled.rlf").write_text(filled(text, lag))
    (base / "compiled.place").write_text(for_models(place, text))
    return api.compile(str(base / "compiled.rlf"), {}, str(base / "compiled.place"))


def test_ranks_that_train_wait_for_no_iteration(base: Path) -> None:
    """They know neither its lengths nor the condition."""
    made = compiled(base, DYNAMIC, 1, PLACES["apart"])
    ranks = {m.id: m.ranks for m in made.meshes}
    inside = [e for e, path in event_paths(made) if len(path) > 1]
    assert inside and {ranks[e.mesh] for e in inside} == {((0, 2),)} and {e.ahead for e in inside} == {1}
    loop, = {path[1] for _, path in event_paths(made) if len(path) > 1}
    assert isinstance(loop, Loop)
    spread = next(s for s in made.spreads if s.id == split_buffer(loop.until)[1])
    assert ranks[spread.mesh] == ((0, 2),)
    assert {e.ahead for e, _ in event_paths(made) if isinstance(e, Train)} == {0}


def test_each_event_of_a_block_runs_for_its_step(base: Path) -> None:
    made = compiled(base, SELDOM, 2, PLACES["apart"])
    ages = {(e.ahead, len(path) > 1) for e, path in event_paths(made) if isinstance(e, Generate)}
    assert ages == {(2, False), (2, True)}
    refreshed = {e.ahead for e, path in event_paths(made) if len(path) == 2 and isinstance(e, Event) and e.refreshes}
    assert refreshed == {EVERY_ITERATION}, "a copy is refreshed in the iterations in which anything of its block runs"


HEAD = '''use std.sft (sft)
data prompts = jsonl("p.jsonl", batch=4)
data others  = jsonl("p.jsonl", batch=4)
model actor = causal_lm("m") train adamw(lr=1e-3)
state x = 0.1
flow f(steps=4, lag=1) {
'''
UNTIL = "repeat {{\n p = prompts.next()\n gen = actor.generate(p)\n {inside}\n}} until {condition} max 3\n{below}\n"
TRAIN = "actor.train(gen, loss=sft())"
REFUSED = {
    "the block changes a state": (UNTIL.format(inside="x = mean(len(gen))", condition="x > 1", below=TRAIN),
                                  "cannot change a `state`"),
    "half of the block": (UNTIL.format(inside="m = actor.generate(p, lag=0)", condition="count(m) > 3", below=TRAIN),
                          "in the same `repeat ... until`"),
    "what a training made": ("q = others.next()\n now = actor.generate(q, lag=0)\n" + UNTIL.format(
        inside="", condition="count(gen) > 3 and mean(len(now)) > 2", below=TRAIN), "does not"),
    "a training in it": (UNTIL.format(inside=TRAIN, condition="count(gen) > 3", below=""), "not allowed"),
    "a metric of some iterations": (UNTIL.format(inside="every 2 { metric n = mean(len(gen)) }",
                                                condition="count(gen) > 3", below=TRAIN), "a metric inside"),
    "a repeat of a fixed number": ("repeat 2 {\n p = prompts.next()\n gen = actor.generate(p)\n" + TRAIN + "\n}",
                                   "cannot be in this block"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_ahead_is_refused(name: str) -> None:
    body, part = REFUSED[name]
    found = api.check(HEAD + body + "\n}\n", "x.rlf")
    assert any(part in d.title and d.help for d in found if d.code in ("RL0223", "RL0212")), found


def test_one_mistake_is_named_once() -> None:
    """What a refused call would have made has no message of its own: not in the condition, and not below."""
    body = UNTIL.format(inside="", condition="count(gen) > 3", below=TRAIN).replace("(p)", "(p, per_step=2)")
    found = [d.code for d in api.check(HEAD + body + "\n}\n", "x.rlf") if d.severity == "error"]
    assert found == ["RL0213"]


@pytest.mark.parametrize("body", [
    "MADE p.rate = 0.3", "every 2 {\nMADE p.rate = 0.3\n}", "repeat {\nMADE} until count(gen) > 3 max 2\np.rate = 0.3"])
def test_generation_from_rows_that_their_state_selects(body: str, base: Path) -> None:
    """The selection runs ahead, too, and sees the state as it is at its place in the earlier step."""
    head = HEAD.replace('"p.jsonl"', '"data/prompts.jsonl"').replace('"m"', '"models/sft"').replace(
        "state x = 0.1", "state rate of prompts = 0.5")
    made = "p = prompts.next()\n k = p where p.rate > 0\n gen = actor.generate(k, max_new_tokens=4)\n"
    (base / "selected.rlf").write_text(head + body.replace("MADE", made) + "\n}\n")
    plan = api.compile(str(base / "selected.rlf"), {})
    assert {e.ahead for e, _ in event_paths(plan) if isinstance(e, Lookup)} == {1}


@pytest.mark.parametrize("block", ["every 2", "first 2", "after 1"])
def test_a_call_in_a_block_may_have_a_lag(block: str) -> None:
    body = "p = prompts.next()\n gen = actor.generate(p, lag=1)\n " + TRAIN
    assert not api.check(HEAD.replace(", lag=1", "") + f"{block} {{\n {body}\n}}\n}}\n", "x.rlf")
    with pytest.raises(Failure, match="RL0205"):
        raise Failure(api.check(HEAD.replace(", lag=1", "") + f"repeat 2 {{\n {body}\n}}\n}}\n", "x.rlf"))


if __name__ == "__main__":
    import sys
    import tempfile

    place = Path(tempfile.mkdtemp())
    make_all(place, tie_word_embeddings=True, num_hidden_layers=2)
    (place / "rewards_small.py").write_text((HERE / "rewards_small.py").read_text())
    os.chdir(place)
    print(kills(place, int(sys.argv[1])) or "no difference")


# ------------------------------------------------------------------------------- what exists in a block alone

EACH = '''
use std.sft (sft)
param base = "models/sft"
param rows = "data/prompts.jsonl"
use py "rewards_small.py" (digits: gen -> seq)
data prompts = jsonl(rows, batch=2, max_prompt_tokens=16)
model actor = causal_lm(base) train adamw(lr=1e-3)
flow run(steps=6, seed=3, lag={lag}) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=2, max_new_tokens=4)
  actor.train(gen, loss=sft())
  first 2 {{ metric early = mean(digits(gen)) }}
  after 2 {{ metric late = mean(digits(gen)) }}
  every 2 {{
    more = actor.generate(prompt, n=2, max_new_tokens=3)
    metric more = mean(digits(more))
  }}
}}
'''


def test_two_blocks_may_each_make_the_same_for_themselves(base: Path) -> None:
    """The rows of `gen` as a reward needs them, which nothing outside the two blocks does."""
    plan = compiled(base, EACH, 1, ALONE)  # and verified
    loop = plan.body[-1]
    assert isinstance(loop, Loop)
    blocks = [i for i in loop.body if isinstance(i, When)]
    made = [{b for e in block.body if isinstance(e, Event) for b in e.writes} for block in blocks]
    assert any(a & b for a, b in combinations(made, 2))


COUNTED = '''
use std.sft (sft)
use py "rewards_small.py" (digits: gen -> seq)
data prompts = jsonl("data/prompts.jsonl", batch=2, max_prompt_tokens=16)
model actor = causal_lm("models/sft") train adamw(lr=1e-3)
state st = 0.5
flow run(steps=4, lag={lag}) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=2, max_new_tokens=4)
  kept   = gen where len(gen) > st
  actor.train(gen, loss=sft())
  metric kept = count(kept)
  st = mean(digits(gen))
}}
'''


@pytest.mark.parametrize("lag", [1, 2])
def test_what_a_state_selects_is_counted_in_its_own_step(lag: int, base: Path) -> None:
    """A count reads no value, only how many rows there are: it runs no earlier than the selection that makes them."""
    plan = compiled(base, COUNTED, lag, ALONE)  # and verified
    ahead = {e.display_name: e.ahead for e, _ in event_paths(plan)}
    assert (ahead["select kept"], ahead["kept#1"], ahead["actor.generate"]) == (0, 0, lag)


def test_what_a_block_makes_ahead_cannot_be_used_outside(base: Path) -> None:
    """In the steps in which the block runs it would be there."""
    plan = compiled(base, EACH, 1, ALONE)
    loop = plan.body[-1]
    assert isinstance(loop, Loop)
    at, block = next((i, x) for i, x in enumerate(loop.body) if isinstance(x, When) and any(
        isinstance(e, Generate) for e in x.body))
    user = next(e for e in block.body if isinstance(e, Transfer | Compute) and e.ahead == 0)
    made = {b for e in block.body if isinstance(e, Generate) for b in e.writes}
    assert made.intersection(user.reads)
    cut = block.body.index(user)
    parts = [replace(block, body=x) for x in (block.body[:cut], block.body[cut + 1:])]
    before, after = (replace(x, aheads=aheads_in(x)) for x in parts)
    body = (*loop.body[:at], before, user, after, *loop.body[at + 1:])
    with pytest.raises(Failure) as refused:
        verify(replace(plan, body=(*plan.body[:-1], replace(loop, body=body))))
    assert any(d.code == "RL0513" and "only in a block" in d.title for d in refused.value.diagnostics), \
        [f"{d.code} {d.title}" for d in refused.value.diagnostics]
