"""The first step of the examples (of that with a replay buffer the third) against plain torch, written from the papers:
which rows are chosen, values, losses and gradients. Nothing of rldsl is used but the rows that the Python functions
saw, and the random numbers of replay. The example with a curriculum: tests/curriculum/test_example.py."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoTokenizer

from rldsl.runtime.draws import uniform
from rldsl.sharding.partition import key_of, mix
from tests.end_to_end import reference
from tests.end_to_end.programs import Metrics
from tests.end_to_end.reference import Sample, response_logprobs
from tests.end_to_end.test_reference import OPTIMIZER, assert_same, moved
from tests.papers.programs import EXAMPLES as PAGES
from tests.papers.programs import Program, program, root, run_all, sample
from tests.tiny import CHARACTERS


def saved(call: str, before: str, after: str) -> tuple[str, str]:
    """The edit that saves a model in front of a `train` call and behind it."""
    model = call.partition(".")[0]
    return (rf"(  {re.escape(call)}.*\n(?: {{4,}}.*\n)*)",
            rf'  save {model} to "FOLDER/{before}"\n\1  save {model} to "FOLDER/{after}"\n')


OPTIMIZE = (r"adamw\(lr=[^)]*\)", OPTIMIZER)
WHOLE = (r", minibatches=\d", "")
REF = (r"(model ref *= causal_lm\()base", r'\1"models/base"')
SAVES = saved("actor.train(", "before", "after")
EDITS = {
    "self_rewarding": (OPTIMIZE, WHOLE, REF, SAVES),
    "online_ipo": (OPTIMIZE, WHOLE, REF, SAVES),
    "sppo": (OPTIMIZE, WHOLE, SAVES),
    "pf_ppo": (OPTIMIZE, WHOLE, REF, SAVES, saved("critic.train(", "critic-before", "critic-after"),
               ("use std.filtration", 'use py "rewards.py" (seen: gen -> seq, taken: gen -> seq)\nuse std.filtration'),
               (r"(  kept   = .*\n)", r"\1  metric seen = mean(seen(gen)) + mean(taken(kept))\n")),
    "vineppo": (OPTIMIZE, WHOLE, SAVES, (r"at=cut, most=most", "every=2, most=most")),
    "critique": (OPTIMIZE, saved("actor.train(gen", "before", "middle"),
                 (r"(  actor\.train\(critique.*\n)", r'\1  save actor to "FOLDER/after"\n')),
    "online_dpo": (OPTIMIZE, WHOLE, REF, SAVES),
    "judge": (OPTIMIZE, (r", minibatches=4", ""), SAVES),
    "raft_replay": (OPTIMIZE, WHOLE, SAVES),
}
SETS = {"vineppo": dict(group=2, tails=3, most=2), "raft_replay": dict(steps=3, keep=5)}
Result = tuple[dict[str, float], Program]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """The last step of each example, on one rank."""
    base = root(tmp_path_factory.mktemp("papers"))
    made: dict[str, Program] = {}
    for name, edits in EDITS.items():
        own = tuple((old, new.replace("FOLDER", str(base / name))) for old, new in edits)
        made[name] = program(base, name, *own, note=True, **{"steps": 1, "batch": 4, "tokens": 6, **SETS.get(name, {})})
    runs: dict[str, Metrics] = run_all(1, {n: p.compiled("place *.* on mesh(0:1)") for n, p in made.items()}, base)
    return {n: (runs[n][-1], p) for n, p in made.items()}


def groups(rows: Sequence[float], n: int) -> list[Sequence[float]]:
    assert len(rows) % n == 0
    return [rows[i : i + n] for i in range(0, len(rows), n)]


def duels(numbers: Sequence[float | None], n: int) -> list[tuple[int, int]]:
    """The first best and the first worst of each n rows, where their numbers differ. None: an absent row."""
    found = []
    for start in range(0, len(numbers), n):
        here = {i: x for i, x in enumerate(numbers[start : start + n], start) if x is not None}
        if here and max(here.values()) > min(here.values()):
            found.append((max(here, key=lambda i: (here[i], -i)), min(here, key=lambda i: (here[i], i))))
    return found


def lead(actor: torch.nn.Module, ref: torch.nn.Module, best: Sample, worst: Sample, temperature: float) -> Tensor:
    """log pi(y+) / pi_ref(y+) - log pi(y-) / pi_ref(y-)."""
    new = [response_logprobs(actor, x, temperature).sum() for x in (best, worst)]
    with torch.no_grad():
        old = [response_logprobs(ref, x, temperature).sum() for x in (best, worst)]
    return (new[0] - old[0]) - (new[1] - old[1])


def check(step: dict[str, float], made: Program, loss: Tensor, actor: torch.nn.Module) -> None:
    assert step["actor/loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    assert_same(moved(made.folder / "before", made.folder / "after"), reference.gradients(actor, loss))


@pytest.mark.thorough
def test_self_rewarding(found: dict[str, Result]) -> None:
    """Scores are averaged over the verdicts that have one; pairs are the best and the worst answer; DPO."""
    step, made = found["self_rewarding"]
    answers = [sample(row) for row, _ in made.rows("review")]
    asked = [text for _, text in made.rows("review") for _ in range(3)]
    judged = made.rows("points")
    assert len(answers) == 4 * 4 and [row["prompt"] for row, _ in judged] == [
        "".join(c for c in text if c in CHARACTERS) for text in asked]
    marks: list[float | None] = []
    for three in groups([x for _, x in judged], 3):
        marks.append(fmean(valid) if (valid := [x for x in three if x >= 0]) else None)
    assert None in marks and any(x < 0 for _, x in judged), "an answer without a score"
    assert step["judged"] == pytest.approx(fmean(x >= 0 for _, x in judged))
    assert step["reward"] == pytest.approx(fmean(x for x in marks if x is not None))
    chosen = duels(marks, 4)
    assert step["pairs"] == len(chosen) > 1
    actor, ref = (reference.causal_lm(x) for x in (made.folder / "before", made.folder.parent / "models/base"))
    loss = torch.stack([-logsigmoid(0.1 * lead(actor, ref, answers[i], answers[j], 0.7)) for i, j in chosen]).mean()
    check(step, made, loss, actor)


def test_vineppo(found: dict[str, Result]) -> None:
    """Monte Carlo values of the beginnings, the advantage of each token, and the clipped objective."""
    step, made = found["vineppo"]
    answers, rest = made.rows("right"), iter(made.rows("right_after"))
    assert len(answers) == 4 * 2
    terms: list[Tensor] = []
    values: list[float] = []
    actor = reference.causal_lm(made.folder / "before")
    for row, reward in answers:
        asked, response = row["prompt_ids"], row["completion_ids"]
        cuts = [c for c in (0, 2, 4) if c < len(response) or not c]
        cuts = cuts if len(cuts) <= 2 else [cuts[i * len(cuts) // 2] for i in range(2)]
        v: list[float] = []
        for cut in cuts:
            tails = [next(rest) for _ in range(3)]
            assert all(tail["prompt_ids"] == asked + response[:cut] and tail["gen"]["completion_ids"] == response
                       for tail, _ in tails)
            texts = [row["completion"][:cut] + tail["completion"] for tail, _ in tails]  # a token is a letter, or none
            if len(row["completion"]) == len(response):
                assert [x for _, x in tails] == [sum(map(ord, text)) % 5 for text in texts]
            v.append(fmean(x for _, x in tails))
        gain = [after - before for before, after in zip(v, [*v[1:], reward], strict=True)]
        values += v
        adv = torch.tensor([gain[max(j for j, c in enumerate(cuts) if c <= t)] for t in range(len(response))])
        terms.append(-adv * (lambda new: (new - new.detach()).exp())(response_logprobs(actor, sample(row), 1.0)))
    assert next(rest, None) is None, "nothing is generated that no value needs"
    assert step["value"] == pytest.approx(fmean(values))
    assert step["reward"] == pytest.approx(fmean(x for _, x in answers))
    check(step, made, torch.cat(terms).mean(), actor)


def test_monte_carlo_values_are_expectations(found: dict[str, Result]) -> None:
    """The value of each beginning against the expected reward, by brute force: over all continuations of two tokens
    with their probabilities. Four values of 400 continuations each lie within four standard errors."""
    base = found["vineppo"][1].folder.parent
    (base / "brute").mkdir()
    made = program(base / "brute", "vineppo", WHOLE, (r"at=cut, most=most", "every=1, most=most"), note=True, steps=1,
                   batch=2, tokens=2, group=1, tails=400, most=2, base=str(base / "models/sft"),
                   rows=str(base / "data/prompts.jsonl"))
    rewards_file = made.folder / "vine.py"
    rewards_file.write_text(rewards_file.read_text().replace(" % 5", " / 100"))  # likely letters change the mean
    run_all(1, {made.name: made.compiled("place *.* on mesh(0:1)")}, base / "brute")
    model = reference.causal_lm(base / "models/sft")
    tokenizer = AutoTokenizer.from_pretrained(base / "models/sft")
    end = tokenizer.eos_token_id
    texts = [tokenizer.decode([i], skip_special_tokens=True) for i in range(len(tokenizer))]
    letters = torch.tensor([sum(map(ord, text)) for text in texts])
    far = 0
    for tails in groups(made.rows("right_after"), 400):
        row, values = tails[0][0], [x for _, x in tails]
        assert all(tail["prompt_ids"] == row["prompt_ids"] for tail, _ in tails)
        ids, begun = row["prompt_ids"], row["prompt_ids"][len(row["gen"]["prompt_ids"]):]
        with torch.no_grad():
            first = model(torch.tensor([ids])).logits[0, -1].double().softmax(-1)
            second = model(torch.tensor([[*ids, i] for i in range(len(letters))])).logits[:, -1].double().softmax(-1)
        second[end] = torch.eye(len(letters), dtype=torch.float64)[end]  # nothing follows the end
        rewards = ((letters[begun].sum() + letters[:, None] + letters) / 100).double()
        p = first[:, None] * second
        mean = (p * rewards).sum().item()
        error = math.sqrt((p * (rewards - mean) ** 2).sum().item() / len(values))
        assert p.sum().item() == pytest.approx(1) and abs(fmean(values) - mean) < 4 * error, (ids, mean)
        far += abs(fmean(values) - rewards.mean().item()) > 4 * error
    assert far == 4, "tokens drawn from another distribution are noticed"


# all functions that see a generated batch whole, and together every one
SEES = {"vineppo": ("right", "right_after"), "self_rewarding": ("review", "points"), "judge": ("ask", "grade"),
        "critique": ("criticize", "revise", "exact_match"), "online_dpo": ("exact_match",)}


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_is_generated_twice(found: dict[str, Result], tmp_path: Path, ranks: int) -> None:
    """Each random number is used for one token, on one rank; and each token is one that a function has seen."""
    base = found["vineppo"][1].folder.parent
    if ranks > 1:
        for name in ("models", "data"):
            (tmp_path / name).symlink_to(base / name)
        made = {name: program(tmp_path, name, *EDITS[name][:1], note=True, **{"steps": 1, "batch": 4, "tokens": 6})
                for name in SEES if name != "vineppo"}
        run_all(ranks, {n: p.compiled(f"place *.* on mesh(0:{ranks}) dp={ranks}") for n, p in made.items()}, tmp_path)
        base = tmp_path
    for name in SEES if ranks == 1 else made:
        files = sorted((base / "responses").glob(f"{name}.*"))
        draws = torch.cat([torch.load(file)[0] for file in files])
        lines = [json.loads(line) for file in (base / "out" / name).glob("seen.*.jsonl")
                 for line in file.read_text().splitlines()]
        tokens = sum(len(row["completion_ids"]) for function, row, _ in lines if function in SEES[name])
        # the answers that are criticized get a reward as well, and so each of them is seen twice
        tokens -= sum(len(row["completion_ids"]) for function, row, _ in lines if function == "criticize")
        assert len(files) == ranks and len(draws) == len(draws.unique()) == tokens > 20, name


def compared(made: Program, n: int, verdicts: int) -> tuple[list[Sample], list[list[float]]]:
    """The n answers to each prompt, and how often each wins against each of the others, in their order."""
    pairs = [row for row, _ in made.rows("versus")]
    won = [fmean(x) for x in groups([x for _, x in made.rows("wins")], verdicts)]
    assert len(pairs) == len(won)
    answers = [sample(pairs[i]["gen"]) for i in range(0, len(pairs), n - 1)]
    for i, answer in enumerate(answers):  # all others of its prompt, each once
        others = [answers[j] for j in range(i // n * n, (i // n + 1) * n) if j != i]
        against = pairs[i * (n - 1) : (i + 1) * (n - 1)]
        assert [sample(row) for row in against] == others
        assert all(sample(row["gen"]) == answer for row in against)
    return answers, [won[i : i + n - 1] for i in range(0, len(won), n - 1)]


def test_online_ipo(found: dict[str, Result]) -> None:
    """(h - 1 / 2 tau)^2 on the pairs of which one answer wins more often."""
    step, made = found["online_ipo"]
    answers, won = compared(made, 2, 4)
    first = [x for (x,) in won]
    chosen = duels(first, 2)
    assert step["pairs"] == len(chosen) and 0 < len(chosen)
    assert step["bias"] == pytest.approx(fmean(first) - 0.5, abs=1e-6)
    actor, ref = (reference.causal_lm(x) for x in (made.folder / "before", made.folder.parent / "models/base"))
    loss = torch.stack([(lead(actor, ref, answers[i], answers[j], 0.9) - 1 / (2 * 0.1)) ** 2 for i, j in chosen]).mean()
    check(step, made, loss, actor)


def test_sppo(found: dict[str, Result]) -> None:
    """(log pi / pi_t - eta (P - 1/2))^2, where P is the mean over the answers to the prompt, itself among them."""
    step, made = found["sppo"]
    answers, won = compared(made, 5, 2)
    rates = [(sum(x) + 0.5) / 5 for x in won]
    assert len(answers) == 4 * 5 and step["best"] == pytest.approx(fmean(max(x) for x in groups(rates, 5)))
    actor = reference.causal_lm(made.folder / "before")
    terms = []
    for answer, rate in zip(answers, rates, strict=True):
        new = response_logprobs(actor, answer).sum()
        terms.append((new - new.detach() - 1000 * (rate - 0.5)) ** 2)
    check(step, made, torch.stack(terms).mean(), actor)


def test_pf_ppo(found: dict[str, Result]) -> None:
    """PPO on the best answer by the reward model, and one other."""
    step, made = found["pf_ppo"]
    models = made.folder.parent / "models"
    judge = reference.sequence_classifier(models / "rm")
    answers = [sample(row) for row, _ in made.rows("seen")]
    with torch.no_grad():
        rewards = [reference.final_score(judge, x).item() for x in answers]
    assert step["reward"] == pytest.approx(fmean(rewards), rel=1e-5)
    kept = [sample(row) for row, _ in made.rows("taken")]
    assert len(answers) == 4 * 5 and len(kept) == 4 * 2
    places = []
    for i in range(4):
        own = answers[5 * i : 5 * i + 5]
        at = [own.index(x) for x in kept[2 * i : 2 * i + 2]]
        best = max(range(5), key=lambda j: rewards[5 * i + j])
        assert best in at and len({*at}) == 2
        places += [x for x in at if x != best]
    assert len({*places}) > 1, "the other one is drawn anew for each prompt"
    actor, ref = reference.causal_lm(made.folder / "before"), reference.causal_lm(models / "base")
    both = reference.ppo(actor, reference.value_model(models / "sft"), ref, judge, kept, coef=0.05)
    for model, name in (("actor", ""), ("critic", "critic-")):
        loss, gradients = both[model]
        assert step[f"{model}/loss"] == pytest.approx(loss, rel=1e-4, abs=1e-5)
        assert_same(moved(made.folder / f"{name}before", made.folder / f"{name}after"), gradients)


def test_critique(found: dict[str, Result]) -> None:
    """Answers and critiques are trained one after the other, each with advantages among its siblings."""
    step, made = found["critique"]
    answers = [sample(row) for row, _ in made.rows("criticize")]
    critiques = [row for row, _ in made.rows("revise")]
    rewards = [x for _, x in made.rows("exact_match")]
    first, revised = rewards[:16], rewards[16:]
    assert (len(answers), len(critiques), len(revised)) == (16, 32, 64)
    assert [sample(row["gen"]) for row in critiques] == [x for x in answers for _ in range(2)]
    second = [fmean(x) for x in groups(revised, 2)]
    better = [x - first[i // 2] for i, x in enumerate(second)]
    assert step["first"] == pytest.approx(fmean(first)) and step["second"] == pytest.approx(fmean(second))
    assert len({*better}) > 2

    before, middle = (reference.causal_lm(made.folder / x) for x in ("before", "middle"))
    for number, (model, texts, advantages) in enumerate((
            (before, answers, normed(first, 4)), (middle, [sample(x) for x in critiques], normed(better, 2)))):
        terms = []
        for text, advantage in zip(texts, advantages, strict=True):
            with torch.no_grad():
                old = response_logprobs(before, text)
            ratio = (response_logprobs(model, text) - old).exp()
            terms.append(torch.max(-advantage * ratio, -advantage * ratio.clip(0.8, 1.2)).mean())
        loss = torch.stack(terms).mean()
        name = "actor#2" if number else "actor"
        assert step[f"{name}/loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-5)
        files = ("middle", "after") if number else ("before", "middle")
        assert_same(moved(*(made.folder / x for x in files)), reference.gradients(model, loss))


def test_online_dpo(found: dict[str, Result]) -> None:
    """DPO on the first best and the first worst of eight answers, where their rewards differ."""
    step, made = found["online_dpo"]
    answers, rewards = [sample(row) for row, _ in made.rows("exact_match")], [x for _, x in made.rows("exact_match")]
    chosen = duels(rewards, 8)
    assert len(answers) == 4 * 8 and step["pairs"] == len(chosen) > 1
    assert step["reward"] == pytest.approx(fmean(rewards))
    assert any(rewards[8 * i : 8 * i + 8].count(max(rewards[8 * i : 8 * i + 8])) > 1 for i in range(4)), "ties"
    actor, ref = (reference.causal_lm(x) for x in (made.folder / "before", made.folder.parent / "models/base"))
    loss = torch.stack([-logsigmoid(0.1 * lead(actor, ref, answers[i], answers[j], 1.0)) for i, j in chosen]).mean()
    check(step, made, loss, actor)


def test_judge(found: dict[str, Result]) -> None:
    """The reward is the mean of three verdicts; GRPO with advantages among the answers to a prompt."""
    step, made = found["judge"]
    asked, verdicts = made.rows("ask"), made.rows("grade")
    answers = [sample(row) for row, _ in asked]
    assert len(answers) == 4 * 8 and len(verdicts) == 3 * len(answers)
    for (row, text), three in zip(asked, groups([row for row, _ in verdicts], 3), strict=True):
        assert row["completion"] in text and {x["prompt"] for x in three} == {
            "".join(c for c in text if c in CHARACTERS)}
    for row, grade in verdicts:
        number = re.search(r"\d+(\.\d+)?", row["completion"])
        assert grade == pytest.approx(min(float(number[0]), 10) / 10 if number else 0)
    grades = groups([x for _, x in verdicts], 3)
    rewards = [fmean(x) for x in grades]
    assert step["reward"] == pytest.approx(fmean(rewards)) and len({*rewards}) > 2
    assert step["doubt"] == pytest.approx(fmean(stdev(x) for x in grades), rel=1e-5)
    actor, terms = reference.causal_lm(made.folder / "before"), []
    for answer, advantage in zip(answers, normed(rewards, 8), strict=True):
        new = response_logprobs(actor, answer)
        terms.append((-advantage * (new - new.detach()).exp()).mean())
    check(step, made, torch.stack(terms).mean(), actor)


def test_raft_replay(found: dict[str, Result]) -> None:
    """The best answer to each prompt is kept where its reward is above 0, in place of the oldest; rows are drawn by
    their rewards, those with the largest log(u) / reward; maximum likelihood on these."""
    step, made = found["raft_replay"]
    buffer: list[tuple[int, Sample]] = []  # a row's number, and the row
    rows = [sample(row, reward) for row, reward in made.rows("exact_match")]
    added, drawn = 0, list[Sample]()
    for number, batch in enumerate(groups(rows, 4 * 8)):
        kept = [x for group in groups(batch, 8) if (x := max(group, key=lambda row: row.reward)).reward > 0]
        buffer = [*buffer, *enumerate(kept, added)][-5:]
        added += len(kept)
        at = torch.tensor([q for q, _ in buffer])
        u = uniform(mix(1, key_of("old"), 0) >> 1, number, at, torch.zeros_like(at)).tolist()
        keys = [math.log(x) / row.reward for x, (_, row) in zip(u, buffer, strict=True)]
        drawn = [buffer[i][1] for i in sorted(sorted(range(len(buffer)), key=lambda i: -keys[i])[:4])]
    assert number == 2 and added > 5, "some rows have left"
    assert step["kept"] == len(kept) and step["reward"] == pytest.approx(fmean(x.reward for x in batch))
    assert len(drawn) == 4 and any(row not in batch for row in drawn), "some rows are of earlier steps"
    actor = reference.causal_lm(made.folder / "before")
    check(step, made, -torch.cat([response_logprobs(actor, row) for row in drawn]).mean(), actor)


@pytest.mark.parametrize("name", [*EDITS, "dapo_curriculum"])
def test_an_example_has_at_most_60_lines(name: str) -> None:
    assert len((PAGES / f"{name}.rlf").read_text().splitlines()) <= 60


def normed(numbers: Sequence[float], n: int) -> list[float]:
    """(r - mean) / (std + 1e-4) in each group of n."""
    rows = torch.tensor(numbers, dtype=torch.float64).view(-1, n)
    return ((rows - rows.mean(1, keepdim=True)) / (rows.std(1, keepdim=True) + 1e-4)).flatten().tolist()


def test_a_wrong_number_of_wins_is_noticed(found: dict[str, Result]) -> None:
    """The comparison can fail: with one win more the loss of the first step is another."""
    step, made = found["sppo"]
    _, won = compared(made, 5, 2)
    wrong = [(sum(x) + 0.5 + (i == 0)) / 5 for i, x in enumerate(won)]
    assert step["actor/loss"] != pytest.approx(fmean((1000 * (x - 0.5)) ** 2 for x in wrong), rel=1e-3)
