"""VinePPO: the first step against plain torch, written from the paper, and three steps under several placements."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.end_to_end import reference
from tests.end_to_end.programs import Metrics
from tests.end_to_end.reference import response_logprobs
from tests.end_to_end.test_reference import OPTIMIZER
from tests.papers.programs import EXAMPLES, RECORDER, Program, root, run_all, sample
from tests.papers.test_reference import check, saved

STEP, MOST, VINES, GROUP, BATCH = "1", 3, 2, 3, 4
# rewards that differ: digits of the whole response, whatever part of it was continued
GRADES = '''
def solved(rows):
    return [float(sum(x in "0123456789" for x in row["completion"])) for row in rows]

def solves(rows):
    whole = [(row["prompt"] + row["completion"])[len(row["gen"]["prompt"]):] for row in rows]
    return [float(sum(x in "0123456789" for x in text)) for text in whole]
'''
PLACES = {
    "dp": "place *.* on mesh(0:2) dp=2",
    "tp": "place *.* on mesh(0:2) tp=2",
    "pp": "place *.* on mesh(0:2) pp=2 mbs=16",
    "cp": "place *.generate on mesh(0:2) dp=2\nplace *.train on mesh(0:2) cp=2",
    "apart": "place @gen on mesh(3:4)\nplace @tails on mesh(0:3) dp=3\nplace *.train on mesh(2:4) dp=2 zero=2",
    "mixed": "place *.generate on mesh(0:4) dp=2 tp=2\nplace *.train on mesh(0:4) dp=2 pp=2",
}


def vineppo(base: Path, name: str, *edits: tuple[str, str], note: bool = False, **sets: Any) -> Program:
    """A copy of the example: small, and with rewards that hang on every token."""
    folder = base / name
    folder.mkdir()
    text = (EXAMPLES / "vineppo.rlf").read_text()
    for old, new in (("n=8", f"n={GROUP}"), (r",\s+minibatches=8, epochs=2", ""),
                     (r"(model ref *= causal_lm\()base", r'\1"models/base"'), ("beta=1e-4", "beta=0.1"), *edits):
        assert re.search(old, text), old
        text = re.sub(old, new, text)
    recorder = RECORDER.replace("seen.jsonl", str(folder / "seen.jsonl")) if note else ""
    (folder / "vineppo.py").write_text(GRADES + recorder)
    return Program(name, folder, text, {"batch": BATCH, "step": STEP, "most": MOST, "vines": VINES} | sets)


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, float], Program]:
    """The first step on one rank."""
    base = root(tmp_path_factory.mktemp("vineppo"))
    folder = base / "vineppo"
    edits = [(old, new.replace("FOLDER", str(folder))) for old, new in (saved("actor.train(", "before", "after"),)]
    made = vineppo(base, "vineppo", (r"adamw\(lr=[^)]*\)", OPTIMIZER), *edits, note=True, steps=1, tokens=24)
    runs: dict[str, Metrics] = run_all(1, {"vineppo": made.compiled("place *.* on mesh(0:1)")}, base)
    return runs["vineppo"][0], made


def test_the_first_step(step: tuple[dict[str, float], Program]) -> None:
    """Monte Carlo values, the gain of each step of the reasoning on its tokens, GRPO's clipped loss with k3."""
    metrics, made = step
    answers = made.rows("solved")
    tails = made.rows("solves")
    assert len(answers) == BATCH * GROUP
    tokenizer = AutoTokenizer.from_pretrained(made.folder.parent / "models/sft")
    at = 0
    advantages: list[list[float]] = []
    values: list[float] = []
    several = 0
    for row, reward in answers:
        places = cut_tokens(row, tokenizer)
        several += len(places) > 1
        v = []
        for place in places:  # the continuations of each state, all from its prefix
            group = tails[at : at + VINES]
            at += VINES
            for tail, _ in group:
                assert tail["prompt_ids"] == row["prompt_ids"] + row["completion_ids"][:place]
                assert tail["gen"]["completion_ids"] == row["completion_ids"]
            v.append(fmean(x for _, x in group))
        values += v
        behind = [*v[1:], reward]
        gains = [b - a for a, b in zip(v, behind, strict=True)]
        token = [gains[sum(p <= i for p in places) - 1] for i in range(len(row["completion_ids"]))]
        advantages.append(token)
    assert at == len(tails) and several > 2  # nothing else was generated, and some responses have several states
    assert metrics["value"] == pytest.approx(fmean(values)) and len({*values}) > 3
    assert metrics["reward"] == pytest.approx(fmean(x for _, x in answers))
    assert metrics["states"] == pytest.approx(len(values) / len(answers))
    actor, ref = (reference.causal_lm(x) for x in (made.folder / "before", made.folder.parent / "models/base"))
    terms = []
    for (row, _), advantage in zip(answers, advantages, strict=True):
        text, a = sample(row), torch.tensor(advantage)
        new = response_logprobs(actor, text)
        with torch.no_grad():
            old, gap = new.clone(), response_logprobs(ref, text)
        ratio, gap = (new - old).exp(), gap - new
        terms.append((torch.max(-a * ratio, -a * ratio.clip(0.8, 1.2)) + 0.1 * (gap.exp() - gap - 1)).mean())
    check(metrics, made, torch.stack(terms).mean(), actor)


def cut_tokens(row: dict[str, Any], tokenizer: Any) -> list[int]:
    """The numbers of tokens before the cuts. The tokenizer has one token per character, and special ones."""
    pieces = [tokenizer.decode([i], skip_special_tokens=True) for i in row["completion_ids"]]
    assert "".join(pieces) == row["completion"]
    places = [0, *(i + 1 for i, x in enumerate(pieces) if x == STEP and i + 1 < len(pieces))]
    return places if len(places) <= MOST else [places[i * len(places) // MOST] for i in range(MOST)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Metrics]:
    """The metrics of three steps, alone and under each placement, in one world of each size."""
    base = root(tmp_path_factory.mktemp("placements"))
    made = vineppo(base, "vineppo", (r"adamw\(lr=[^)]*\)", "adamw(lr=0.01, eps=1e-3)"), steps=3, tokens=12)
    found = run_all(1, {"vineppo": made.compiled("place *.* on mesh(0:1)")}, base)
    for size in (2, 4):
        plans = {f"vineppo {place}": made.compiled(rules) for place, rules in PLACES.items()
                 if (place in ("apart", "mixed")) == (size == 4)}
        found |= run_all(size, plans, base, {plan: found["vineppo"].responses for plan in plans})
    return found


@pytest.mark.many
@pytest.mark.parametrize("place", PLACES)
def test_the_placement_changes_no_number(runs: dict[str, Metrics], place: str) -> None:
    alone, other = runs["vineppo"], runs[f"vineppo {place}"]
    assert len(alone) == len(other) == 3
    for mine, theirs in zip(other, alone, strict=True):
        assert mine == {k: pytest.approx(v, rel=2e-4, abs=2e-5) for k, v in theirs.items()}, place
    assert alone[0]["actor/grad_norm"] != alone[1]["actor/grad_norm"] != alone[2]["actor/grad_norm"]
