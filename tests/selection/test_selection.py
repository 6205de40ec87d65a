"""Selections and collections against the same thing written with weights, and over placements."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.samples import thorough_between
from tests.selection.programs import folder, numbers, run, under

PLACES = {
    "one rank": "place *.* on mesh(0:1)",
    "dp": "place *.* on mesh(0:2) dp=2",
    "tp and pp": "place actor.generate on mesh(0:4) dp=2 tp=2\nplace actor.train on mesh(0:4) dp=2 pp=2",
    "apart": "place actor.generate on mesh(0:2) tp=2\nplace actor.train on mesh(2:4) dp=2 mbs=1",
}

FEWER = [PLACES[p] for p in ("one rank", "tp and pp", "apart")]  # of which two have dp

GENERATE = "  prompt = prompts.next()\n  gen = actor.generate(prompt, n=4, max_new_tokens=6)\n"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("selection"))


def close(a: list[dict[str, float]], b: list[dict[str, float]], tolerance: float = 1e-5) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b):
        assert x.keys() == y.keys()
        for key in x:
            assert abs(x[key] - y[key]) <= tolerance * (1 + abs(y[key])), (key, x[key], y[key])


def both(base: Path, condition: str) -> None:
    """Training on the kept sequences = training on all of them with weight 0 or N / n."""
    start = GENERATE + f"  r = parity(gen)\n  q = spread(gen)\n  chosen = {condition}\n"
    kept = run(base, start + """
  kept = gen where chosen
  metric n = count(len(kept))
  metric reward = mean(over(q, kept))
  metric length = mean(len(kept))
  metric logprob = mean(kept.logprobs)
  actor.train(kept, loss=pg(adv=q, weight=1.0))""")
    weighed = run(base, start + """
  w = where(chosen, 1, 0) + 0 * q
  n = sum(w)
  t = where(w > 0, 1, 0) + 0 * gen.logprobs
  metric n = n
  metric reward = sum(q * w) / n
  metric length = sum(len(gen) * w) / n
  metric logprob = sum(gen.logprobs * t) / sum(t)
  actor.train(gen, loss=pg(adv=q, weight=w * count(w) / n))""", like=kept)
    assert 0 < kept[0]["n"] < 16
    close(numbers(kept), numbers(weighed))


def test_whole_prompts_are_kept(base: Path) -> None:
    both(base, "std(r by prompt) > 0.55")


def test_sequences_are_kept(base: Path) -> None:
    both(base, "q == max(q by prompt)")


SELECT = GENERATE + """
  r = parity(gen)
  q = spread(gen)
  adv = group_norm(q)
  kept = gen where std(r by prompt) > 0.55
  best = kept where q >= mean(over(q, kept) by prompt)
  lp = actor.logprobs(best)
  again = spread(best)
  metric kept = count(len(kept))
  metric best = count(len(best))
  metric prompts = count(count(again by prompt))
  metric gap = mean(abs(lp - best.logprobs))
  metric same = mean(abs(again - q))
  metric number = mean(column(best))
  actor.train(best, loss=pg(adv=adv, weight=1 / len(best)), minibatches=3, epochs=2)"""


@pytest.mark.thorough
def test_a_selection_of_a_selection_on_every_placement(base: Path) -> None:
    """Row numbers, rewards, columns and log-probs of a selection belong together wherever they are."""
    found = under(base, SELECT, [*PLACES.values()])
    first = found[0]
    assert 0 < first[0]["best"] < first[0]["kept"] < 16
    assert first[0]["same"] == 0 and first[0]["gap"] < 1e-4
    for metrics in found:
        close(metrics, first, 1e-4)


def test_fewer_rows_than_minibatches(base: Path) -> None:
    """What no minibatch has is not in the line, and the schedule goes on."""
    body = GENERATE + """
  q = spread(gen)
  kept = gen where q == max(q by prompt)
  none = gen where q > 2
  metric n = count(len(none))
  actor.train(kept, loss=pg(adv=1, weight=1), minibatches=8)
  actor.train(none, loss=pg(adv=1, weight=1), minibatches=2)"""
    head = "model falling = causal_lm(\"model\") train adamw(lr=0.01, schedule=linear)"
    for place in ("one rank", "dp"):
        first, last = run(base, body.replace("actor.train(none", "falling.train(none"), top=head, place=PLACES[place])
        assert last["n"] == 0 and last["actor/grad_norm"] > 0 and last["actor/loss"]
        assert [name for name in last if name.startswith("falling/")] == ["falling/lr"]
        assert first["falling/lr"] == pytest.approx(0.01 * 3 / 4)
        assert last["falling/lr"] == pytest.approx(0.01 / 4)


def test_answers_and_pairs_can_be_selected(base: Path) -> None:
    answers = """
  row = answers.next()
  long = row where len(row) > 2
  metric n = count(len(long))
  metric shortest = min(len(long))
  actor.train(long, loss=nll())"""
    pairs = """
  pair = pairs.next()
  far = pair where len(pair.chosen) - len(pair.rejected) > 2
  metric n = count(len(far.chosen))
  metric both = count(len(far.rejected))
  metric least = min(len(far.chosen) - len(far.rejected))
  actor.train(far.chosen, far.rejected, loss=margin())"""
    for body, key, least in ((answers, "shortest", 3), (pairs, "least", 4)):
        one, two = (numbers(run(base, body, place=PLACES[p])) for p in ("one rank", "dp"))
        close(two, one)
        assert one[0][key] == least and 0 < one[0]["n"] < 6
        assert one[0].get("both", one[0]["n"]) == one[0]["n"]


def test_generation_goes_on_from_selected_prompts(base: Path) -> None:
    body = """
  prompt = prompts.next()
  first = actor.generate(prompt, n=3, max_new_tokens=4)
  hard = prompt where mean(parity(first) by prompt) < 0.5
  more = actor.generate(hard, n=2, max_new_tokens=4)
  metric prompts = count(count(parity(more) by prompt))
  metric rows = count(len(more))
  metric number = mean(column(more))
  actor.train(more, loss=nll())"""
    found = under(base, body, [PLACES["one rank"], PLACES["apart"]], batch=6)
    assert 0 < found[0][0]["prompts"] < 6 and found[0][0]["rows"] == 2 * found[0][0]["prompts"]
    for other in found[1:]:
        close(other, found[0], 1e-4)


# ---------------------------------------------------------------------------------------------- repeat until


def collecting(turns: int, until: str = "count(len(gen)) > 1000") -> str:
    return f"""
  repeat {{
    prompt = prompts.next()
    gen = actor.generate(prompt, n=2, max_new_tokens=5, greedy=true)
    q = spread(gen)
  }} until {until} max {turns}
  metric n = count(len(gen))
  metric reward = mean(q)
  metric number = mean(column(gen))
  metric spread = mean(std(q + column(gen) by prompt))
  lp = actor.logprobs(gen)
  actor.train(gen, loss=pg(adv=q, weight=1), minibatches=2)
  metric lp = mean(lp)"""


@pytest.mark.thorough
def test_three_batches_collected_are_one_batch_of_three(base: Path) -> None:
    whole = """
  prompt = prompts.next()
  gen = actor.generate(prompt, n=2, max_new_tokens=5, greedy=true)
  q = spread(gen)
  metric n = count(len(gen))
  metric reward = mean(q)
  metric number = mean(column(gen))
  metric spread = mean(std(q + column(gen) by prompt))
  lp = actor.logprobs(gen)
  actor.train(gen, loss=pg(adv=q, weight=1), minibatches=2)
  metric lp = mean(lp)"""
    first = numbers(run(base, whole, batch=12))
    for place in FEWER:
        close(numbers(run(base, collecting(3), batch=4, place=place)), first, 1e-4)


@pytest.mark.thorough
def test_the_condition_ends_the_loop_on_every_rank(base: Path) -> None:
    """Two turns of four are enough for seven; the data goes on where it stopped."""
    found = under(base, collecting(5, "count(len(gen)) >= 14"), FEWER)
    assert [step["n"] for step in found[0]] == [16, 16]
    assert found[0][0]["number"] == sum(range(8)) / 8 and found[0][1]["number"] == sum(range(8, 16)) / 8
    for other in found[1:]:
        close(other, found[0], 1e-4)


@pytest.mark.thorough
def test_dynamic_sampling(base: Path) -> None:
    """DAPO: groups with one reward only are thrown away until there are enough (arXiv:2503.14476, section 3.2)."""
    body = """
  repeat {
    prompt = prompts.next()
    gen = actor.generate(prompt, n=3, max_new_tokens=4)
    r = parity(gen)
    adv = group_norm(r)
    kept = gen where std(r by prompt) > 0
  } until count(len(kept)) >= 18 max 4
  metric kept = count(len(kept))
  metric all = count(len(gen))
  metric least = min(std(over(r, kept) by prompt))
  metric mean = mean(over(adv, kept))
  actor.train(kept, loss=pg(adv=adv, weight=1), minibatches=2)"""
    found = under(base, body, FEWER)
    first = found[0]
    assert all(step["kept"] >= 18 or step["all"] == 48 for step in first)
    assert all(step["least"] > 0 and abs(step["mean"]) < 1e-5 for step in first)
    for metrics in found:
        close(metrics, first, 1e-4)


@pytest.mark.parametrize("use, place", thorough_between([
    ("actor.train(kept, loss=nll())", "apart"),
    ("metric m = mean(spread(kept))\n  actor.train(kept, loss=nll())", "tp and pp"),
    ("lp = actor.logprobs(kept)\n  metric m = mean(lp)\n  actor.train(kept, loss=nll(), minibatches=2)", "apart"),
    ("easy = prompt where mean(parity(gen) by prompt) >= 0.5\n  more = actor.generate(easy, max_new_tokens=3)\n"
     "  actor.train(more, loss=nll())", "tp and pp"),
]))
def test_what_was_collected_may_be_used_alone(base: Path, use: str, place: str) -> None:
    """Nothing else of the frames that a collected selection was taken from needs to be read after the loop."""
    body = f"""
  repeat {{
    prompt = prompts.next()
    gen = actor.generate(prompt, n=3, max_new_tokens=4)
    kept = gen where spread(gen) > 0.3
  }} until count(kept) >= 14 max 3
  metric n = count(kept)
  {use}"""
    found = under(base, body, [PLACES["one rank"], PLACES[place]])
    assert found[0][0]["n"] > 0
    close(found[1], found[0], 1e-4)


def test_loops_in_loops(base: Path) -> None:
    """A `repeat` in a collecting loop; several fetches of one source go on where the last one stopped."""
    body = """
  first = prompts.next()
  repeat {
    prompt = prompts.next()
    gen = actor.generate(prompt, max_new_tokens=3)
    repeat 2 { tries = tries + 1 }
  } until count(gen) >= 8 max 3
  g = actor.generate(first, max_new_tokens=3)
  metric first = mean(column(g))
  metric later = mean(column(gen))
  metric tries = tries
  actor.train(g, loss=nll())"""
    for place in ("one rank", "apart"):
        found = run(base, body, top="state tries = 0", place=PLACES[place])
        assert [(m["first"], m["later"], m["tries"]) for m in found] == [(1.5, 7.5, 4), (13.5, 19.5, 8)]
