"""Starters that differ from another one by a few lines: the same program with another algorithm.

In: the name of a preset and the text of its base. Out: its text. Error: ValueError for a change that its base does not
have, or has twice, which a test finds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_COMMAND = re.compile(r"^(#   rlc \S.*?\S)  +(\S.*)$", re.MULTILINE)  # a command and what it does, in columns


@dataclass(frozen=True, slots=True)
class Preset:
    """A starter made of another one."""

    base: str
    """The name of that one."""
    line: str
    """Its first line, without the `# `."""
    changes: tuple[tuple[str, str], ...]
    """A text of the base, which it has once, and what replaces it."""


_GRPO_FREE = (  # GRPO without a reference model
    ("initial policy and KL reference", "initial policy"),
    ("param kl         = 0.001                 # weight of the KL penalty; for 0, use `grpo_free` and drop `ref`\n",
     ""),
    ("# A model with `train` is trained; one without is frozen (inference only).\n", ""),
    ("model ref   = causal_lm(base, dtype=bfloat16)\n", ""), ("  ref_lp = ref.logprobs(gen)\n", ""),
    ("place ref.logprobs   on mesh(0:8) dp=4 tp=2 mbs=4\n", ""))
_GRPO_USE, _GRPO_LOSS = "use std.grpo (group_norm, grpo)", "grpo(old=gen.logprobs, adv=adv, ref=ref_lp, beta=kl)"
_DPO_LOSS = "dpo(ref_chosen=chosen, ref_rejected=rejected, beta=beta)"
_SIMPO_PARAMS = """param beta  = 2.0                 # scale of the rewards
param gamma = 1.0                 # margin by which the chosen answer should win; about half of beta
"""
_ORPO_PARAM = """param lam   = 0.1                 # weight of the preferences; the likelihood of chosen answers has 1
"""
_GKD_PARAMS = """param likely     = 16                    # tokens of the teacher that are compared at each position
param others     = "rest"                # all other tokens count as one more; "ignore": not at all
"""
_DISTILL_METRIC = """the KL divergence from the teacher, which should fall.
  metric kl     = mean(gen.logprobs - judged)
"""
_DAPO_FLOW = """# One training step. While it trains, the other GPUs sample until the next step has enough sequences,
# with the policy of `ahead` steps earlier. The ratio to `kept.logprobs`, of that policy, corrects for the difference.
flow dapo(steps=steps, seed=1, lag=ahead) {"""
_SIM = "#   rlc sim dapo.rlf --cluster h100x8      predict the time of a step, and what the lag gains\n"
_STEPS_PARAM = "each step samples until there are enough sequences, then trains once\n"
_AHEAD_PARAM = f"""{_STEPS_PARAM}\
param ahead      = 1                     # steps by which sampling runs ahead; 0: with the policy of the step
"""
_DAPO_TOGETHER = """place actor.generate on mesh(0:8) dp=4 tp=2
place actor.train    on mesh(0:8) tp=4 pp=2 mbs=1"""
_DAPO_APART = """# Sampling has GPUs of its own, or the lag gains nothing.
place actor.generate on mesh(0:4) dp=2 tp=2 mbs=256
place actor.train    on mesh(4:8) tp=4 mbs=1"""
_GKD_METRIC = """the probability of all other tokens.
  metric rest   = mean(judged.rest)
"""

PRESETS = {
    "gspo": Preset("grpo", "GSPO: GRPO whose importance ratios are those of whole answers.", (
        *_GRPO_FREE, (_GRPO_USE, "use std.grpo (group_norm)\nuse std.gspo (gspo)"),
        (_GRPO_LOSS, "gspo(old=gen.logprobs, adv=adv)"))),
    "dapo_async": Preset("dapo", "Asynchronous DAPO: dynamic sampling for the next step while this one trains.", (
        ("#   rlc run dapo.rlf --out", _SIM + "#   rlc run dapo.rlf --out"), (_STEPS_PARAM, _AHEAD_PARAM),
        ("# One training step.\nflow dapo(steps=steps, seed=1) {", _DAPO_FLOW),
        (_DAPO_TOGETHER, _DAPO_APART))),
    "dr_grpo": Preset("grpo", "Dr GRPO: GRPO without division by the deviation of rewards or the length of answers.", (
        *_GRPO_FREE, (_GRPO_USE, "use std.grpo (dr_grpo, group_norm)"),
        ("group_norm(reward)", "group_norm(reward, by_std=false)"),
        (_GRPO_LOSS, "dr_grpo(old=gen.logprobs, adv=adv, horizon=new_tokens)"))),
    "cispo": Preset("grpo", "CISPO: GRPO in which every token keeps its gradient and only its weight is bounded.", (
        *_GRPO_FREE, (_GRPO_USE, "use std.cispo (cispo)\nuse std.grpo (group_norm)"),
        (_GRPO_LOSS, "cispo(old=gen.logprobs, adv=adv)"))),
    "ipo": Preset("dpo", "IPO: a policy learns from pairs of answers, with a squared loss that does not saturate.", (
        ("use std.dpo (dpo)", "use std.ipo (ipo)"), ("param beta  = 0.1 ", "param tau   = 0.1 "),
        (_DPO_LOSS, "ipo(ref_chosen=chosen, ref_rejected=rejected, tau=tau)"))),
    "orpo": Preset("simpo", "ORPO: supervised fine-tuning and preferences in one loss, without a reference model.", (
        ("use std.simpo (simpo)", "use std.orpo (orpo)"), (_SIMPO_PARAMS, _ORPO_PARAM),
        ("simpo(beta=beta, gamma=gamma)", "orpo(lam=lam)"), ("wins) and margin.", "wins) and nll."))),
    "gkd": Preset("distill", "GKD: a small model writes answers and matches a larger one at its most likely tokens.", (
        ("use std.distill (distill)", "use std.gkd (gkd)"),
        ("param lr         = 1e-5 ", f"{_GKD_PARAMS}param lr         = 1e-5 "),
        ("teacher.logprobs(gen)", "teacher.top(gen, k=likely)"),
        ("distill(old=gen.logprobs, teacher=judged)", "gkd(teacher=judged.logprobs, beta=0.5, others=others)"),
        (_DISTILL_METRIC, _GKD_METRIC), ("place teacher.logprobs on", "place teacher.top      on"))),
}


def text(name: str, base: str) -> str:
    """The program, from the text of its base."""
    preset = PRESETS[name]
    found = base
    for old, new in preset.changes:
        if found.count(old) != 1:
            raise ValueError(f"{preset.base}.rlf must contain this once: {old}")
        found = found.replace(old, new)
    first, rest = found.split("\n", 1)
    rest = rest.replace(f"{preset.base}.rlf", f"{name}.rlf").replace(f"runs/{preset.base} ", f"runs/{name} ")
    rest = re.sub(r"^flow \w+\(", f"flow {name}_run(", rest, flags=re.MULTILINE)
    return _aligned(f"# {preset.line}\n{rest}")


def _aligned(program: str) -> str:
    """What the commands of the first comment do, in one column again."""
    width = max((len(m[1]) for m in _COMMAND.finditer(program)), default=0)
    return _COMMAND.sub(lambda m: f"{m[1]:{width}}      {m[2]}", program)
