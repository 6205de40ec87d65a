"""Each phase of a step as a fraction of the least time that this machine could take for it.

    python -m benchmarks.bound [--seed S] [--shapes N] [--only I ...] [--turns N] [--step] [--peer PYTHON] [--ranks N]
    python -m benchmarks.bound --model DIR [--prompts N] [--n N] [--prompt TOKENS] [--tokens TOKENS] [--step] ...

Shapes are drawn by seed (`bound_shapes.py`), or one is given with a model directory without experts. For each, one
process with one thread measures the rate of matrix products at the very shapes of its phases, all layers' weights in
turn, and the bandwidth of memory, and from these the least times (`bound_least.py`), before and after it has run the
phases (`bound_sides.py`) as rldsl and as transformers run them, in turns. Fractions are least time / time, of the least
CPU times of all turns, so that what else runs on the machine meets both sides of a fraction. transformers samples other
tokens, so its least time of decoding is scaled by their number.

--step: whole GRPO steps as well, by rldsl and by TRL's GRPOTrainer, each in a separate process (`step.py`); their
least time is the sum of prefill, decoding, forward, backward and update, scaled by the tokens that they sampled.
TRL is looked for in the interpreter that --peer or the environment variable RLDSL_TRL_PYTHON names.

--ranks N: whole GRPO steps on N ranks with one thread each as well, by rldsl (dp=N) and by TRL (DDP over gloo), with as
many prompts and samples in all; their least time is the mean of the shares of the ranks, measured by N processes at
once (`bound_ranks.py`), and their time is that of rank 0 by the wall, so nothing else may run. Messages are not counted
in the least time.

Gates are of the medians over shapes: decode 0.75, training (forward, backward and update) 0.85, a GRPO step 0.8. The
exit status is 1 where one is missed, which says nothing of a single model, and 2 for wrong arguments.
"""

from __future__ import annotations

import sys

from benchmarks.bound_arguments import parse


def main() -> int:
    given = parse(__doc__ or "")
    from benchmarks.bound_measure import run  # torch, which takes seconds to import

    return run(given)


if __name__ == "__main__":
    sys.exit(main())
