"""grpo as a program for a debugger: plan PLAN, all ranks.

Each function lists the events of the ranks in its name, one line per event, in plan order.
Put `breakpoint()` anywhere. `run.value("VALUE@SPREAD")` is this rank's part of a value, `run.state` is everything else.

    torchrun --nproc-per-node 4 a_ranks.py a.plan --plain

Written by `rlc emit a.plan --rank all`.
"""

from rldsl.run import main
from rldsl.runtime.interpreter.emitted_program import Program, Rank


def ranks_0_to_1(run: Rank) -> None:
    """Ranks 0-1: 16 events."""
    run.load(0)                       # actor
    run.load(1)                       # actor
    for step in run.loop("step"):  # 10 times
        run.fetch(3)                  # grpo.rlf:8 prompt = tasks.next
        run.realloc(4)                # actor (gen reads actor on L2)
        run.generate(5)               # grpo.rlf:9 gen = actor.generate
        run.lengths(6)                # gen.lengths (e7 is ragged)
        run.transfer(7)               # gen.tokens (ref_lp reads gen)
        run.transfer(9)               # gen.tokens (adv reads gen)
        run.compute(10)               # grpo.rlf:11 adv, reward
        run.transfer(11)              # gen.tokens, gen.logprobs (actor.train reads gen)
        run.transfer(12)              # adv (actor.train reads adv)
        run.transfer(13)              # ref_lp (actor.train reads ref_lp)
        run.train(14)                 # grpo.rlf:12 actor.train
        run.log(15)                   # reward, actor/loss
        run.free(16)                  # prompt.tokens, prompt.lengths, prompt.columns, gen.tokens, gen.logprobs, gen.fi…
        if step % 2 == 0:
            run.save(17)              # grpo.rlf:13 actor


def ranks_2_to_3(run: Rank) -> None:
    """Ranks 2-3: 15 events."""
    run.load(1)                       # actor
    run.load(2)                       # ref
    for step in run.loop("step"):  # 10 times
        run.fetch(3)                  # grpo.rlf:8 prompt = tasks.next
        run.realloc(4)                # actor (gen reads actor on L2)
        run.generate(5)               # grpo.rlf:9 gen = actor.generate
        run.lengths(6)                # gen.lengths (e7 is ragged)
        run.transfer(7)               # gen.tokens (ref_lp reads gen)
        run.infer(8)                  # grpo.rlf:10 ref_lp = ref.logprobs
        run.transfer(9)               # gen.tokens (adv reads gen)
        run.compute(10)               # grpo.rlf:11 adv, reward
        run.transfer(11)              # gen.tokens, gen.logprobs (actor.train reads gen)
        run.transfer(12)              # adv (actor.train reads adv)
        run.transfer(13)              # ref_lp (actor.train reads ref_lp)
        run.log(15)                   # reward, actor/loss
        run.free(16)                  # prompt.tokens, prompt.lengths, prompt.columns, gen.tokens, gen.logprobs, gen.fi…


PROGRAM = Program(
    plan="PLAN",
    file="a.plan",
    schedules=(
        (ranks_0_to_1, (range(0, 2),)),
        (ranks_2_to_3, (range(2, 4),)),
    ),
)

if __name__ == "__main__":
    main(PROGRAM)
