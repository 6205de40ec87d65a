"""docs/algorithms.md tells the truth: its line counts are those of the files, and its one-line calls compile."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rldsl import api
from tests.samples import thorough_between

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/algorithms.md").read_text()
ROWS = re.findall(r"^\| ([^|]+) \| `(\w+)\.rlf` \| (\d+) \|", PAGE, re.M)
POLICY = PAGE.partition("## Policy gradient")[2].partition("\n## ")[0]
CALLS = re.findall(r"^\| [^|]+ \| `([^`]+)` \|", POLICY, re.M)
EXPORTS = {m.group(1): path.stem for path in sorted((ROOT / "stdlib").glob("*.rlf")) if path.stem != "prelude"
           for m in re.finditer(r"^(?:fn|loss) (\w+)", path.read_text(), re.M)}
LOSSES = {m.group(1) for path in (ROOT / "stdlib").glob("*.rlf")
          for m in re.finditer(r"^loss (\w+)", path.read_text(), re.M)}


def lines(name: str) -> int:
    """Lines of a library file that are neither blank nor a comment."""
    text = (ROOT / "stdlib" / f"{name}.rlf").read_text()
    return sum(1 for line in text.splitlines() if line.strip() and not line.strip().startswith("#"))


@pytest.mark.parametrize(("title", "name", "count"), ROWS)
def test_the_table_counts_right(title: str, name: str, count: str) -> None:
    assert int(count) == lines(name), f"{title}: {name}.rlf has {lines(name)} lines of code"


def test_no_file_of_the_library_is_longer_than_forty_lines_of_code() -> None:
    long = {p.name: lines(p.stem) for p in (ROOT / "stdlib").glob("*.rlf") if lines(p.stem) > 40}
    assert not long


def test_the_table_has_every_file_of_the_library() -> None:
    assert {name for _, name, _ in ROWS} == {p.stem for p in (ROOT / "stdlib").glob("*.rlf")}


def program(call: str) -> str:
    """A small flow around one call: a loss, or an expression."""
    words = {w for w in re.findall(r"\b(\w+)\(", call) if w in EXPORTS}
    uses = "".join(f"use std.{EXPORTS[w]} ({w})\n" for w in sorted(words))
    head = call.partition("(")[0]
    if head in LOSSES:
        model = "critic" if head == "value_clip" else "actor"
        end = f"{model}.train(gen, loss={call})"
    else:
        end = f"{'adv2, result' if head in ('gae', 'vapo_gae') else 'result'} = {call}\n  actor.train(gen, loss=ppo_clip(old=old, adv=r))"
        uses += "" if "ppo_clip" in words else "use std.ppo (ppo_clip)\n"
    return f"""{uses}use py "rewards.py" (score: gen -> seq, other: gen -> seq)
data prompts = jsonl("p.jsonl", batch=8)
state beta = 0.1
model actor  = causal_lm("a") train adamw(lr=1e-6)
model critic = value_model("a") train adamw(lr=1e-6)
model model2 = causal_lm("a")
flow f(steps=1) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=4)
  best   = actor.generate(prompt, greedy=true)
  r      = score(gen)
  r2     = other(gen)
  greedy = score(best)
  old    = gen.logprobs
  lp     = actor.logprobs(gen)
  t      = model2.top(gen, k=4)
  at     = model2.logprobs_at(gen, t.ids)
  d      = model2.distribution(gen)
  ref    = model2.logprobs(gen)
  v      = critic.values(gen)
  rt     = at_end(r)
  ret    = rt + v
  adv    = r + 0 * old
  chosen = adv
  h      = actor.entropy(gen)
  sq     = actor.sum_squares(gen)
  {end}
}}
"""


def mistakes(call: str, folder: Path) -> list[str]:
    (folder / "rewards.py").write_text("def score(rows):\n    return [0.0] * len(rows)\n\n\ndef other(rows):\n    return score(rows)\n")
    return [f"{d.code} {d.title}" for d in api.check(program(call), str(folder / "page.rlf"))]


@pytest.mark.parametrize("call", thorough_between(CALLS))
def test_the_call_compiles(call: str, tmp_path: Path) -> None:
    assert mistakes(call, tmp_path) == []


@pytest.mark.parametrize(("call", "code"), [
    ("ppo_clip(old=old, adv=adv, dualclip=3)", "RL0107"), ('ppo_clip(old=old, adv=adv, agg="tokens")', "RL0205"),
    ("group_norm(adv)", "RL0201")])
def test_a_wrong_call_would_be_seen(call: str, code: str, tmp_path: Path) -> None:
    assert any(m.startswith(code) for m in mistakes(call, tmp_path))


ALGORITHMS = {  # example -> what it stands on in the library
    "sft": "sft", "reward_model": "reward_model", "distill": "distill", "gkd": "gkd", "generate": "", "best_of_n": "best_of_n",
    "raft_replay": "sft",
    "online_dpo": "dpo", "online_ipo": "ipo", "self_rewarding": "dpo", "sppo": "sppo",
    "dpo": "dpo", "ipo": "ipo", "simpo": "simpo", "kto": "kto", "orpo": "orpo", "cdpo": "cdpo", "ppo": "ppo",
    "ppo_full": "ppo moments", "grpo": "grpo", "dr_grpo": "grpo", "dapo": "dapo", "dapo_curriculum": "dapo",
    "gspo": "gspo", "cispo": "cispo",
    "rloo": "rloo", "reinforce_pp": "reinforce_pp", "reinforce_pp_baseline": "reinforce_pp", "remax": "remax",
    "opo": "opo", "gpg": "gpg", "grpo_tis": "correction", "sapo": "sapo", "gmpo": "gmpo", "gdpo": "grpo",
    "clip_cov": "covariance", "kl_cov": "covariance",
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_an_example_and_names_paper_and_equation(name: str) -> None:
    text = (ROOT / "examples" / f"{name}.rlf").read_text()
    for module in ALGORITHMS[name].split():
        assert f"use std.{module} (" in text
        written = (ROOT / f"stdlib/{module}.rlf").read_text().splitlines()
        notes = " ".join(line for line in written if line.startswith("#"))
        assert re.search(r"\b(19|20)\d\d\b", notes), "no paper"
        place = r"\b(equations?|section|algorithm|appendix) [\dA-H]"
        assert module == "correction" or re.search(place, notes), "no equation"  # TIS stands in a post without numbers


def test_there_are_calls_for_each_system() -> None:
    assert len(CALLS) > 30 and all(word in POLICY for word in ("TRL", "verl", "OpenRLHF", "ReaL"))
