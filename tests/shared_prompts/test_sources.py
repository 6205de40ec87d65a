"""Which rows of a plan's frames have the same prompt."""

from __future__ import annotations

from pathlib import Path

from rldsl import api
from rldsl.plan.prompt_sources import PromptSource, prompt_sources
from tests.tiny import make_all

HEAD = """use std.dpo (dpo)
use py "judge.py" (ask: gen -> prompts(max_tokens=16))
data prompts = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=16)
data pairs = jsonl("data/pairs.jsonl", batch=4, max_prompt_tokens=16, max_answer_tokens=8)
model actor = causal_lm("models/sft") train adamw(lr=1e-3)
flow f(steps=1, seed=1) {
  prompt = prompts.next()
  gen = actor.generate(prompt, n=4, max_new_tokens=4)
  r = mean(gen.logprobs by seq)
%s
  metric x = mean(r)
}
"""


def sources(tmp_path: Path, body: str) -> dict[str, PromptSource]:
    make_all(tmp_path)
    (tmp_path / "judge.py").write_text("def ask(rows):\n    return [row['prompt'] for row in rows]\n")
    (tmp_path / "p.rlf").write_text(HEAD % body)
    return prompt_sources(api.compile(str(tmp_path / "p.rlf"), {}))


def test_samples_of_a_prompt_and_what_is_selected_of_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = sources(tmp_path, """
  kept = gen where r > 0
  metric y = mean(mean(actor.logprobs(kept) by seq))
  more = actor.generate(gen, n=2, max_new_tokens=4)
  metric z = mean(mean(actor.logprobs(more) by seq))""")
    assert found["gen"] == found["kept"] == PromptSource("prompt", 4)
    assert found["more"] == PromptSource("gen", 2), "the prompt of a continuation is the whole text so far"


def test_the_sides_of_pairs_have_one_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = sources(tmp_path, """
  duel = pair(pick(gen, r), pick(gen, -r))
  given = pairs.next()
  actor.train(duel.chosen, duel.rejected, loss=dpo(
      ref_chosen=actor.logprobs(duel.chosen), ref_rejected=actor.logprobs(duel.rejected)))
  metric y = mean(mean(actor.logprobs(given.chosen) by seq))
  metric z = mean(mean(actor.logprobs(given.rejected) by seq))""")
    picked = [s for name, s in found.items() if name not in ("prompt", "gen") and s.frame == "prompt"]
    assert len(picked) >= 2 and {*picked} == {PromptSource("prompt", 1)}
    assert found["given.chosen"] == found["given.rejected"] == PromptSource("given.chosen", 1)


def test_other_frames_have_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = sources(tmp_path, """
  cuts = prefixes(gen, every=2, most=2)
  tail = actor.generate(cuts, n=2, max_new_tokens=2)
  asked = ask(gen)
  answer = actor.generate(asked, n=2, max_new_tokens=2)
  other = actor.generate(prompt, n=4, max_new_tokens=2)
  both = concat(gen, other)
  metric y = mean(mean(actor.logprobs(both) by seq)) + mean(mean(actor.logprobs(tail) by seq))
  metric z = mean(mean(actor.logprobs(answer) by seq))""")
    assert not {"cuts", "asked", "both"} & {*found}
    assert found["tail"] == PromptSource("cuts", 2) and found["answer"] == PromptSource(found["answer"].frame, 2)
