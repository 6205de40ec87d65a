"""`train` of a batch of pairs without a side: the message shows both ways to write it."""

from __future__ import annotations

from rldsl.api import examine

PROGRAM = """use std.dpo (dpo)
data pairs = jsonl("p.jsonl", batch=2, kind=pairs)
model actor = causal_lm("m") train adamw(lr=1e-4)
model ref = causal_lm("m")
flow d(steps=1, seed=1) {
  pair = pairs.next()
  rw = ref.logprobs(pair.chosen)
  rl = ref.logprobs(pair.rejected)
  actor.train(SIDES, loss=dpo(ref_chosen=rw, ref_rejected=rl, beta=0.1))
}
"""


def test_the_help_is_what_works() -> None:
    [found] = examine(PROGRAM.replace("SIDES", "pair"), "p.rlf")
    assert found.code == "RL0203" and "`train(pair.chosen, pair.rejected, ...)`" in found.help
    assert not examine(PROGRAM.replace("SIDES", "pair.chosen, pair.rejected"), "p.rlf")


def test_other_calls_take_one_side() -> None:
    [found] = examine(PROGRAM.replace("logprobs(pair.chosen)", "logprobs(pair)").replace("SIDES", "pair.chosen, "
                                                                                         "pair.rejected"), "p.rlf")
    assert found.code == "RL0203" and found.help == "use one side: `.chosen` or `.rejected`"
