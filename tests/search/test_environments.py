"""The search counts the time in which conversations wait for their environments, as the simulator does."""

from __future__ import annotations

from pathlib import Path

import pytest

from rldsl.clusters.model import Distribution
from rldsl.search.branch_and_bound import branch_and_bound
from rldsl.search.evaluator import Evaluator
from rldsl.simulate import Lengths
from rldsl.simulate.conversations import PassCosts, ShardConversations
from tests.search.programs import ACTOR, HEAD, PROMPTS, REF, cluster, instance

GAME = '''class Game:
    def reset(self, **row) -> None:
        """Starts."""

    def guess(self, number: int) -> str:
        """Guesses.

        Args:
            number: a number
        """
        return "no"

    def get_reward(self) -> float:
        return 1.0
'''
FLOW = """
flow grpo(steps=10, seed=1) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, env=Game, n=n, max_turns=6, max_new_tokens=tokens, max_tokens=2048)
  ref_lp = ref.logprobs(gen)
  actor.train(gen, loss=grpo(old=gen.logprobs, adv=group_norm(gen.reward), ref=ref_lp, beta=0.04), minibatches=4)
}
"""
TURNS = 3  # of each conversation


def with_latency(folder: Path, seconds: float, response: float = 300.0, **sets: int) -> Evaluator:
    (folder / "envs.py").write_text(GAME)
    use = f'use std.grpo (group_norm, grpo)\nuse py "{folder / "envs.py"}" (Game: env)\n'
    machines = cluster(1, 2, turns=Distribution(TURNS), tool_seconds=Distribution(seconds),
                       reset_seconds=Distribution(seconds))
    text = HEAD + use + PROMPTS + ACTOR + REF + FLOW
    return instance("grpo", "1B", machines, Lengths(0.0, response), text=text, batch=16, **sets)


def test_a_step_is_longer_by_what_environments_take(tmp_path: Path) -> None:
    fast, slow = (branch_and_bound(with_latency(tmp_path, s), gap=0.0) for s in (0.0, 50.0))
    waits = 50.0 * (TURNS + 1)  # the environment begins, and answers each turn
    assert slow.best[0].seconds - fast.best[0].seconds == pytest.approx(waits, rel=0.01)
    assert slow.bound > waits, "the bound counts them, too"


@pytest.mark.parametrize("response, own", [(300.0, 32 * TURNS), (50.0, 50.0)])
def test_the_model_writes_no_more_than_its_turns_allow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                       response: float, own: float) -> None:
    """The environment has written the rest of what follows the prompt, which is prefilled."""
    seen: list[ShardConversations] = []

    def conversation_seconds(shard: ShardConversations, costs: PassCosts) -> tuple[float, float]:
        seen.append(shard)
        return 1.0, 1.0

    monkeypatch.setattr("rldsl.simulate.time_costs.conversation_seconds", conversation_seconds)
    i = with_latency(tmp_path, 0.0, response, tokens=32)
    job = next(j for j in i.calls if j.kind == "generate")
    assert i.table.candidates(job, 2) and seen
    prompt = i.problem.frames[job.frames[0]].max_prompt_tokens
    assert {(x.own_tokens, x.context_tokens) for x in seen} == {(own, prompt + response - own)}


def test_what_conversations_take_of_the_host_is_in_the_bound(tmp_path: Path) -> None:
    """A call alone takes as long as in the step, so the bound counts the same, and stays below what was found."""
    (tmp_path / "envs.py").write_text(GAME)
    use = f'use std.grpo (group_norm, grpo)\nuse py "{tmp_path / "envs.py"}" (Game: env)\n'
    found = []
    for start in (0.0, 5e6):
        machines = cluster(1, 2, turns=Distribution(TURNS), conversation_us=start, turn_us=start / 10)
        found.append(branch_and_bound(instance("grpo", "1B", machines, Lengths(0.0, 300.0), batch=16,
                                               text=HEAD + use + PROMPTS + ACTOR + REF + FLOW), gap=0.0))
    free, taken = found
    assert taken.best[0].seconds > taken.bound * 0.999 > free.best[0].seconds + 16 * 5.0 / 2
