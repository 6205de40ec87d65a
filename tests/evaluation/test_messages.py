"""What an evaluation may hold, and what the compiler says of mistakes in it."""

from __future__ import annotations

import pytest

from rldsl.diag import Failure
from rldsl.graph import model as g
from rldsl.graph.build import build_recovering
from rldsl.source import SourceFile
from rldsl.syntax.parse import parse
from tests.evaluation.programs import small

P = "p = heldout.next()"
ANS = f"{P}\nans = actor.generate(p, n=2, max_new_tokens=4)"
GOOD = f"{ANS}\nmetric n = mean(len(ans))"


def found(text: str) -> list[tuple[str, str]]:
    """(code, title) of every mistake."""
    try:
        graph, diagnostics = build_recovering(parse(SourceFile("e.rlf", text)), {})
    except Failure as failure:
        diagnostics = tuple(failure.diagnostics)
    return [(d.code, d.title) for d in diagnostics]


RIGHT = {
    "in_an_every": small(GOOD),
    "in_the_flow": small(GOOD, where=""),
    "a_bound": small(GOOD).replace("eval heldout {", "eval heldout max 2 + 3 {"),
    "reductions_by_prompt": small(f"{ANS}\nd = len(ans) - mean(len(ans) by prompt)\nmetric d = max(abs(d))"),
    "a_selection": small(f"{ANS}\nlong = ans where len(ans) > 2\nmetric n = count(long)"),
    "a_quantile_over_all_rows": small(f"{ANS}\nmetric q = quantile(len(ans), 0.9)"),
    "a_state_that_is_read": small(f"{ANS}\nmetric over = mean(len(ans)) - best"),
    "a_state_that_is_written": small(f"{ANS}\nbest = max(best, mean(len(ans)))"),
    "two_evaluations": small(GOOD, outside='eval other {\nq = other.next()\nb = actor.generate(q)\nmetric m = mean(len(b))\n}',
                             more='data other = jsonl("data/other.jsonl", batch=2)\n'),
}


@pytest.mark.parametrize("text", RIGHT.values(), ids=RIGHT)
def test_is_right(text: str) -> None:
    assert found(text) == []


WRONG = {
    "training": (f"{GOOD}\nactor.train(ans, loss=ppo_clip(old=ans.logprobs, adv=len(ans)))", "RL0212", "training"),
    "save": (f"{GOOD}\nsave actor", "RL0212", "`save`"),
    "sync": (f"{GOOD}\nsync actor from actor", "RL0212", "`sync`"),
    "ema": (f"{GOOD}\nema actor from actor 0.9", "RL0212", "`ema`"),
    "checkpoint": (f"{GOOD}\ncheckpoint every 2", "RL0212", "`checkpoint`"),
    "every": (f"{GOOD}\nevery 2 {{ save actor }}", "RL0212", "`every`"),
    "repeat": (f"{GOOD}\nrepeat 2 {{ save actor }}", "RL0212", "`repeat`"),
    "eval_in_eval": (f"{GOOD}\neval heldout {{\n{GOOD}\n}}", "RL0212", "`eval`"),
    "stop": (f"{GOOD}\nstop when 1 > 0", "RL0212", "`stop`"),
    "return": (f"{GOOD}\nreturn 1", "RL0212", "`return`"),
    "no_metric": (ANS, "RL0212", "no `metric`"),
    "no_rows": ("metric n = 1", "RL0212", "does not read its rows"),
    "rows_of_another_source": (f"{GOOD}\nq = prompts.next()", "RL0212", "`prompts.next()`"),
    "rows_twice": (f"{GOOD}\nq = heldout.next()", "RL0212", "second `heldout.next()`"),
    "a_mean_of_one_batch": (f"{ANS}\nm = mean(len(ans))\nmetric m2 = m", "RL0201", "over the batch"),
    "a_mean_inside_arithmetic": (f"{ANS}\nd = len(ans) - mean(len(ans))\nmetric m = std(d)", "RL0201", "over the batch"),
    "a_state_of_many_numbers": (f"{GOOD}\nbest = len(ans)", "RL0201", "state"),
    "a_metric_of_many_numbers": (f"{ANS}\nmetric n = len(ans)", "RL0201", "single number"),
    "a_metric_before_its_name": (f"{P}\nmetric n = mean(len(ans))\nans = actor.generate(p)", "RL0101", "ans"),
    "generation_from_outside": (f"{P}\nx = actor.generate(prompt)\nmetric m = mean(len(x))", "RL0212",
                                "from outside the block"),
}


@pytest.mark.parametrize("body,code,words", WRONG.values(), ids=WRONG)
def test_is_said(body: str, code: str, words: str) -> None:
    says = found(small(body))
    assert any(c == code and words in title for c, title in says), says
    assert len(says) <= 2, says


HEADS = {
    "unknown_data": ("eval heldout {", "eval holdout {", "RL0101"),
    "a_model": ("eval heldout {", "eval actor {", "RL0203"),
    "a_batch": ("eval heldout {", "eval prompt {", "RL0203"),
    "no_batches": ("eval heldout {", "eval heldout max 0 {", "RL0205"),
    "half_a_batch": ("eval heldout {", "eval heldout max 1.5 {", "RL0205"),
    "in_a_repeat": ("every 2 {", "repeat 2 {", "RL0212"),
    "a_metric_twice": ("metric n =", "metric r =", "RL0102"),
    "no_name": ("eval heldout {", "eval {", "RL0001"),
}


@pytest.mark.parametrize("old,new,code", HEADS.values(), ids=HEADS)
def test_heads_are_checked(old: str, new: str, code: str) -> None:
    says = found(small(GOOD).replace(old, new, 1))
    assert says and code in {c for c, _ in says}, says


def test_names_of_the_block_end_with_it() -> None:
    assert [c for c, _ in found(small(GOOD, outside="metric after = mean(len(ans))"))] == ["RL0101"]


def test_what_comes_after_reads_training_data_again() -> None:
    assert found(small(GOOD, outside="again = prompts.next()\ng2 = actor.generate(again)\nmetric a = mean(len(g2))")) == []
