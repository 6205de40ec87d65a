"""Which calls of docs/algorithms.md are compared with which system's own function, and on what.

A row is one call of the page and one system that the page names for it. `oracle` is the function of the system's server
(`serve_*.py`), `options` what it sets besides the system's defaults: a row without options is what the system computes
when nothing is set. `batches` are those of `cases.py`.

The page's column "compared with" is held to this table by `test_page.py`; `make oracles` runs it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RAGGED = ("ragged 1", "ragged 2")  # responses of 1 to 9 tokens, groups of three
FAR = (*RAGGED, "far")  # log-ratios of up to ±30, beyond every bound
GROUPS = (*RAGGED, "pairs of answers", "alone")  # groups of three, two and one
PAIRS = ("pairs 1", "pairs 2", "one pair")


@dataclass(frozen=True)
class System:
    """A system whose own functions are called."""

    page: str
    """How the page names it in its column."""
    package: str
    """Its distribution on the package index."""
    server: str
    """The script that answers for it."""
    environment: str
    """The folder of its virtual environment under .oracles/, and its requirements file."""

    @property
    def version(self) -> str:
        """As its requirements pin it."""
        text = (HERE / f"requirements-{self.environment}.txt").read_text()
        return next(line.partition("==")[2] for line in text.splitlines() if line.partition("==")[0] == self.package)


SYSTEMS = {
    "TRL": System("TRL", "trl", "serve_trl.py", "trl"),
    "TRL 1.12": System("TRL", "trl", "serve_trl112.py", "trl112"),
    "verl": System("verl", "verl", "serve_verl.py", "verl"),
    "OpenRLHF": System("OpenRLHF", "openrlhf", "serve_openrlhf.py", "openrlhf"),
    "ReaL": System("ReaL", "realhf", "serve_real.py", "real"),
}
TRANSCRIBED = ("slime", "NeMo-RL", "SimPO", "Thinking Machines", "AReaL")  # no wheel on the index has their function


@dataclass(frozen=True)
class Row:
    call: str
    system: str
    oracle: str
    options: dict[str, Any] = field(default_factory=dict)
    batches: tuple[str, ...] = RAGGED
    tolerance: float = 1e-10
    """Of value and gradient, absolute and relative."""
    because: str = ""
    """Why the tolerance is wider, or a batch is left out."""
    same: bool = True
    """False: the page says that the two differ, and they must."""

    @property
    def name(self) -> str:
        return f"{self.system}: {self.call}"


TOKENS = "the system adds 1e-8 to the number of tokens"
EVEN = ("even",)
PLACE = "TRL's PPO puts the score one place behind the last token: the same where all responses have the full length"
OPENRLHF_ALONE = "its command refuses groups of one"
WEIGHT = "beyond ±20 its weight is that of 20"
OPENRLHF_REWARDS = "old, ref, coef=0.01, most=10, kl_most=10"

POLICY: tuple[Row, ...] = (
    # PPO
    Row("ppo_clip(old=old, adv=adv)", "TRL 1.12", "ppo_loss", batches=FAR),
    Row("ppo_clip(old=old, adv=adv, dual=3, bound=20)", "verl", "policy_loss", batches=FAR),
    Row("ppo_clip(old=old, adv=adv, bound=20)", "OpenRLHF", "actor_loss", batches=FAR),
    Row("ppo_stop(old=old, adv=adv, most_ratio=5)", "ReaL", "actor_loss",
        because="far: beyond the ratio ReaL zeroes the loss of that micro-batch"),
    # value loss
    Row("value_clip(old=v, ret=ret, eps=0.2)", "ReaL", "value_loss"),
    Row("value_clip(old=v, ret=ret, eps=0.2)", "TRL 1.12", "value_loss", batches=EVEN, because=PLACE),
    Row("value_clip(old=v, ret=ret, eps=0.5)", "verl", "value_loss"),
    Row("value_clip(old=v, ret=ret, eps=0.5)", "OpenRLHF", "value_loss"),
    # GAE
    Row("gae(rt, v, gamma=1, lam=0.95)", "TRL 1.12", "gae", batches=EVEN, because=PLACE),
    Row("gae(rt, v, gamma=1, lam=1)", "verl", "gae"),
    Row("gae(rt, v, gamma=1, lam=1)", "OpenRLHF", "gae"),
    Row("gae(rt, v, gamma=1, lam=1)", "ReaL", "gae"),
    # normalised advantages
    Row("whiten(adv)", "verl", "whiten", tolerance=1e-8, because=TOKENS),
    Row("whiten(adv)", "TRL 1.12", "whiten"),
    Row("whiten(adv, eps=0, unbiased=false, least=1e-8)", "OpenRLHF", "whiten"),
    Row("whiten(adv, eps=0, unbiased=false, plus=1e-5)", "ReaL", "whiten"),
    # KL in the reward
    Row("kl_rewards(r, old, ref, coef=0.05)", "TRL 1.12", "kl_rewards", batches=EVEN, because=PLACE),
    Row("kl_rewards(r, old, ref, coef=0.05)", "TRL 1.12", "kl_rewards", same=False),
    Row("kl_rewards(r, old, ref, coef=0.001)", "verl", "kl_rewards", batches=FAR),
    Row("kl_rewards(r, old, ref, coef=0.01, most=10, kl_most=10)", "OpenRLHF", "kl_rewards", batches=FAR),
    Row("finished_rewards(r, gen.finished, old, ref, coef=0.1, most=20)", "ReaL", "kl_rewards", batches=FAR),
    Row("adaptive_kl(beta, mean(mean(old - ref by seq)), n=8, target=0.1, horizon=10000)", "verl", "adaptive_kl",
        {"kl_ctrl": {"type": "adaptive", "kl_coef": 0.1}}, ("near 0.1", "eight")),
    Row("adaptive_kl(beta, mean(mean(clip(old - ref, -10, 10) by seq)), n=8, target=6, horizon=10000)", "OpenRLHF",
        "adaptive_kl", {"algo.kl.init_coef": 0.1, "algo.kl.target": 6.0}, ("near 6", "eight")),
    Row("adaptive_kl(beta, 0 - beta * mean(old - ref), n=8, target=6, horizon=10000)", "ReaL", "adaptive_kl",
        {"adaptive_kl_ctl": True}, ("near -60", "eight")),
    # the advantage of GRPO
    Row("group_norm(r)", "TRL", "grpo_advantage", batches=GROUPS),
    Row("group_norm(r, eps=1e-6, alone=true)", "verl", "advantage", {"adv_estimator": "grpo"}, GROUPS),
    Row("clip(group_norm(r, eps=1e-9), -10, 10)", "OpenRLHF", "plain_advantage",
        {"algo.advantage.estimator": "group_norm", "algo.kl.use_loss": True}, (*RAGGED, "pairs of answers"),
        because=OPENRLHF_ALONE),
    Row(f"discount(kl_rewards(group_norm(r, eps=1e-9), {OPENRLHF_REWARDS}), 1)", "OpenRLHF", "advantage",
        {"algo.advantage.estimator": "group_norm"}, (*RAGGED, "pairs of answers"), because=OPENRLHF_ALONE),
    Row("whiten(per_token(clip(group_norm(r, eps=1e-5), -20, 20), old), eps=0, unbiased=false, plus=1e-5)", "ReaL",
        "grpo_advantage", batches=(*RAGGED, "pairs of answers"),
        because="groups of one: its deviation is not a number"),
    Row("group_norm(r, by_std=false)", "TRL", "grpo_advantage", {"scale_rewards": "none"}, GROUPS),
    Row("clip(group_norm(r, by_std=false), -10, 10)", "OpenRLHF", "plain_advantage",
        {"algo.advantage.estimator": "dr_grpo", "algo.kl.use_loss": True}, (*RAGGED, "pairs of answers"),
        because=OPENRLHF_ALONE),
    Row("group_norm(r, by_std=false, alone=true)", "verl", "advantage",
        {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False}, GROUPS),
    Row("(r - mean(r by prompt)) / (std(r) + 1e-4)", "TRL", "grpo_advantage", {"scale_rewards": "batch"}, GROUPS),
    Row("gdpo_norm(r, r2, wa=1, wb=1)", "TRL", "grpo_advantage", {"multi_objective_aggregation": "normalize_then_sum"},
        GROUPS),
    Row("whiten(per_token(group_norm(r, eps=1e-6, alone=true) + group_norm(r2, eps=1e-6, alone=true), old))", "verl",
        "gdpo", {"adv_estimator": "gdpo", "gdpo_reward_keys": ["r", "r2"]}, GROUPS, 1e-8, TOKENS),
    # GRPO
    Row("grpo(old=old, adv=adv, ref=ref, beta=0.04)", "TRL", "grpo_loss",
        {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False}, FAR),
    Row('grpo(old=old, adv=adv, ref=ref, beta=0.04, kl_by_ratio=true, agg="token-mean")', "TRL", "grpo_loss",
        {"beta": 0.04}, FAR),
    Row("grpo_free(old=old, adv=adv)", "TRL", "grpo_loss", {"loss_type": "grpo"}, FAR),
    Row('grpo_free(old=old, adv=adv, agg="token-mean")', "TRL", "grpo_loss", batches=FAR),
    Row('grpo_free(old=old, adv=adv, agg="token-mean")', "TRL", "grpo_loss", {"loss_type": "bnpo"}, FAR),
    Row("grpo_free(old=old, adv=adv, dual=2)", "TRL", "grpo_loss", {"loss_type": "grpo", "delta": 2.0}, FAR),
    Row('grpo(old=old, adv=adv, ref=ref, beta=0.001, dual=3, bound=20, kl_bound=20, kl_most=10, agg="token-mean")',
        "verl", "policy_loss", {"use_kl_loss": True}, FAR),
    Row("grpo(old=old, adv=adv, ref=ref, beta=0.001, dual=3, bound=20, kl_bound=20, kl_most=10, kl_through=true, "
        'agg="token-mean")', "verl", "policy_loss", {"use_kl_loss": True, "kl_loss_type": "k3+"}, FAR),
    Row('grpo(old=old, adv=adv, ref=ref, beta=0.01, bound=20, kl_kind="k1", kl_most=10, agg="token-mean")', "OpenRLHF",
        "actor_loss", {"algo.kl.use_loss": True}, FAR),
    Row('grpo(old=old, adv=adv, ref=ref, beta=0.01, bound=20, kl_most=10, agg="token-mean")', "OpenRLHF", "actor_loss",
        {"algo.kl.use_loss": True, "algo.kl.estimator": "k3"}, FAR),
    Row('grpo(old=old, adv=adv, ref=ref, beta=0.1, agg="token-mean")', "ReaL", "grpo_loss",
        because="far: beyond the ratio ReaL zeroes the loss of that micro-batch"),
    Row("dr_grpo(old=old, adv=adv, horizon=512)", "TRL", "grpo_loss",
        {"loss_type": "dr_grpo", "max_completion_length": 512}, FAR),
    Row('grpo_free(old=old, adv=adv, dual=3, bound=20, agg="seq-mean-token-sum-norm", horizon=512)', "verl",
        "policy_loss", {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 512}, FAR),
    # DAPO
    Row("dapo(old=old, adv=adv)", "TRL", "grpo_loss", {"epsilon_high": 0.28}, FAR),
    Row("dapo(old=old, adv=adv, bound=20)", "OpenRLHF", "actor_loss", {"actor.eps_clip_low_high": [0.2, 0.28]}, FAR),
    Row("dapo(old=old, adv=adv, dual=10, bound=20)", "verl", "policy_loss",
        {"clip_ratio_high": 0.28, "clip_ratio_c": 10.0}, FAR),
    Row("r + overlong(len(gen), most=512, buffer=128)", "verl", "overlong",
        {"most": 512, "buffer": {"len": 128, "penalty_factor": 1.0}}, ("long",)),
    Row("r + overlong(len(gen), most=512, buffer=128)", "OpenRLHF", "overlong", {"most": 512, "buffer": 128},
        ("long",)),
    # GSPO
    Row("gspo(old=old, adv=r)", "TRL", "grpo_loss", {"loss_type": "grpo", "importance_sampling_level": "sequence",
                                                     "epsilon": 3e-4, "epsilon_high": 4e-4}, FAR),
    Row('gspo(old=old, adv=r, low=0.2, high=0.2, most=10, agg="token-mean")', "verl", "policy_loss",
        {"policy_loss": {"loss_mode": "gspo"}}, FAR),
    Row("gspo(old=old, adv=r, low=0.2, high=0.2)", "OpenRLHF", "actor_loss", {"actor.policy_loss_type": "gspo"}, FAR,
        1e-7, TOKENS),
    Row("gspo_token(old=old, adv=adv)", "TRL 1.12", "gspo_token_loss",
        {"loss_type": "grpo", "importance_sampling_level": "sequence_token", "epsilon": 3e-4, "epsilon_high": 4e-4},
        FAR),
    # CISPO
    Row("cispo(old=old, adv=adv, low=1, high=4)", "TRL", "grpo_loss", {"loss_type": "cispo", "epsilon_high": 5.0}, FAR),
    Row("cispo(old=old, adv=adv, low=0.2, high=0.2, bound=20)", "verl", "policy_loss",
        {"policy_loss": {"loss_mode": "cispo"}}, FAR),
    # REINFORCE, RLOO
    Row("leave_one_out(r)", "verl", "advantage", {"adv_estimator": "rloo"}, GROUPS),
    Row("clip(leave_one_out(r), -10, 10)", "OpenRLHF", "plain_advantage",
        {"algo.advantage.estimator": "rloo", "algo.kl.use_loss": True}, (*RAGGED, "pairs of answers"),
        because=OPENRLHF_ALONE),
    Row(f"discount(kl_rewards(leave_one_out(r), {OPENRLHF_REWARDS}), 1)", "OpenRLHF", "advantage",
        {"algo.advantage.estimator": "rloo"}, (*RAGGED, "pairs of answers"), because=OPENRLHF_ALONE),
    Row("leave_one_out(r - 0.05 * sum(old - ref by seq))", "TRL", "rloo_advantage",
        batches=(*RAGGED, "pairs of answers"),
        because="groups of one, which its training refuses, have an advantage of 0"),
    Row("rloo_clip(old=old, adv=r)", "TRL", "rloo_loss", batches=FAR),
    # REINFORCE++
    Row("reinforce_pp(kl_rewards(r, old, ref, coef=0.01))", "verl", "reinforce_pp",
        {"adv_estimator": "reinforce_plus_plus", "kl_ctrl": {"kl_coef": 0.01}}, RAGGED, 1e-8, TOKENS),
    Row(f"reinforce_pp(kl_rewards(r, {OPENRLHF_REWARDS}), eps=0, unbiased=false, least=1e-8)", "OpenRLHF", "advantage",
        {"algo.advantage.estimator": "reinforce"}),
    Row("reinforce_pp_baseline(r, old, alone=true)", "verl", "token_advantage",
        {"adv_estimator": "reinforce_plus_plus_baseline"}, GROUPS, 1e-8, TOKENS),
    Row(f"reinforce_pp(kl_rewards(r - mean(r by prompt), {OPENRLHF_REWARDS}), eps=0, unbiased=false, least=1e-8)",
        "OpenRLHF", "advantage", {"algo.advantage.estimator": "reinforce_baseline"}, (*RAGGED, "pairs of answers"),
        because=OPENRLHF_ALONE),
    # ReMax, OPO, GPG
    Row("over_greedy(r, r2)", "verl", "advantage", {"adv_estimator": "remax"}, ("alone",)),
    Row("reinforce_token(adv=whiten(discount(at_end(over_greedy(r, r2)), 0.99), eps=0, unbiased=false, plus=1e-5))",
        "ReaL", "remax", batches=("alone",)),
    Row("optimal_baseline(r, len(gen), alone=true)", "verl", "advantage", {"adv_estimator": "opo"}, GROUPS),
    Row("token_baseline(discount(rt, 1), old, sq)", "verl", "token_baseline",
        {"adv_estimator": "optimal_token_baseline"}, GROUPS),
    Row("gpg(adv=gpg_norm(r, nonzero=true, alone=true))", "verl", "estimated_loss",
        {"adv_estimator": "gpg", "policy_loss": {"loss_mode": "gpg"}}, GROUPS),
    # SAPO, GMPO
    Row("sapo(old=old, adv=adv)", "TRL", "grpo_loss", {"loss_type": "sapo"}, FAR),
    Row("sapo(old=old, adv=adv, bound=20)", "verl", "policy_loss", {"policy_loss": {"loss_mode": "sapo"}}, FAR, 1e-8,
        TOKENS),
    Row("gmpo(old=old, adv=r)", "TRL", "gmpo_loss", batches=FAR),
    Row("gmpo(old=old, adv=r, low=0.2, high=0.2)", "verl", "policy_loss", {"policy_loss": {"loss_mode": "geo_mean"}},
        FAR, 1e-7, TOKENS),
    # LUSPO, VESPO, OPSM, DPPO, DRO
    Row("luspo(old=old, adv=r)", "TRL", "grpo_loss",
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 2e-3, "epsilon_high": 2.5e-3}, FAR),
    Row("vespo(old=old, adv=r)", "TRL", "grpo_loss", {"loss_type": "vespo"}, FAR),
    Row("opsm(old=old, adv=r, sampled=old, most_kl=0.05)", "TRL", "grpo_loss", {"off_policy_mask_threshold": 0.05},
        FAR),
    Row("dppo_tv(old=old, adv=adv, most=3)", "verl", "policy_loss", {"policy_loss": {"loss_mode": "dppo_tv"}}, FAR),
    Row("dppo_kl(old=old, adv=adv, most=3)", "verl", "policy_loss", {"policy_loss": {"loss_mode": "dppo_kl"}}, FAR),
    Row("dro_token(ref=old, adv=adv, beta=0.5)", "verl", "policy_loss",
        {"policy_loss": {"loss_mode": "dro", "dro_beta": 0.5}}, FAR),
    # pass@k, high-entropy tokens
    Row("best_of_group(r)", "verl", "advantage", {"adv_estimator": "grpo_passk"}, (*RAGGED, "pairs of answers"),
        because="it refuses groups of one"),
    Row("best_of_group(r, by_std=false)", "verl", "advantage",
        {"adv_estimator": "grpo_passk", "norm_adv_by_std_in_grpo": False}, (*RAGGED, "pairs of answers"),
        because="it refuses groups of one"),
    Row("grpo_entropy(old=old, adv=adv)", "TRL", "grpo_loss",
        {"top_entropy_quantile": 0.2}, FAR),
    # Clip-Cov, KL-Cov
    Row("clip_cov(old=old, adv=adv, chosen=chosen)", "verl", "clip_cov_loss",
        {"policy_loss": {"loss_mode": "clip_cov", "clip_cov_ratio": 1.0, "clip_cov_lb": 0.5, "clip_cov_ub": 50.0}}),
    Row("kl_cov_tokens(old, adv, share=2e-4)", "verl", "kl_cov_choice", {"policy_loss": {"loss_mode": "kl_cov"}}),
    Row("kl_cov(old=old, adv=adv, chosen=chosen, coef=0.1)", "verl", "kl_cov_loss",
        {"policy_loss": {"loss_mode": "kl_cov", "kl_cov_ratio": 0.25}}),
    # sampler and trainer differ
    Row("ppo_clip(old=lp, adv=adv * truncated(lp, old, most=2), dual=3, bound=20)", "verl", "corrected_loss",
        {"correction": {"rollout_is": "token"}}, because=WEIGHT),
    Row("ppo_clip(old=lp, adv=adv * truncated_seq(lp, old, most=2), dual=3, bound=20)", "verl", "corrected_loss",
        {"correction": {}}, because=WEIGHT),
    Row("ppo_clip(old=lp, adv=adv * banded(lp, old, low=0.5, high=5), dual=3, bound=20)", "verl", "corrected_loss",
        {"correction": {"rollout_is": "token", "rollout_is_threshold": "0.5_5"}}, FAR),
    Row("ppo_clip(old=lp, adv=adv * banded(lp, old, low=0.5, high=5), bound=20)", "OpenRLHF", "actor_loss",
        {"algo.advantage.is_correction_level": "token"}, FAR),
    Row("ppo_clip(old=lp, adv=adv * truncated(lp, old, least=0.5, most=5), bound=20)", "OpenRLHF", "actor_loss",
        {"algo.advantage.is_correction_level": "token", "algo.advantage.is_correction_mode": "clip"}, FAR),
    Row('grpo_free(old=lp, adv=adv * truncated(lp, old, most=3), agg="token-mean")', "TRL", "corrected_loss",
        {"vllm": True, "vllm_importance_sampling_mode": "token_truncate"}, FAR),
    Row('grpo_free(old=lp, adv=adv * banded(lp, old, low=0, high=3), agg="token-mean")', "TRL", "corrected_loss",
        {"vllm": True, "vllm_importance_sampling_mode": "token_mask"}, FAR),
    Row('grpo_free(old=lp, adv=adv * truncated_seq(lp, old, most=3), agg="token-mean")', "TRL", "corrected_loss",
        {"vllm": True, "vllm_importance_sampling_mode": "sequence_truncate"}, FAR),
    Row('grpo_free(old=lp, adv=adv * banded_seq(lp, old, high=3), agg="token-mean")', "TRL", "corrected_loss",
        {"vllm": True}, FAR),
)

BOTH = "ref_chosen=rw, ref_rejected=rl, beta=0.3"


def pair_loss(call: str, loss_type: str, **more: Any) -> Row:
    """A loss of TRL's DPO trainer by its `loss_type`."""
    return Row(call, "TRL", "dpo", {"beta": 0.3, "loss_type": loss_type} | more, PAIRS)


PREFERENCE: tuple[Row, ...] = (
    Row("sft()", "TRL", "sft"),
    Row("sft()", "OpenRLHF", "sft"),
    Row("dft()", "TRL", "sft", {"loss_type": "dft"}),
    Row("reward_model()", "OpenRLHF", "reward_model", batches=PAIRS),
    Row("reward_model()", "OpenRLHF", "reward_model", {"model.loss_type": "logexp"}, PAIRS),
    Row("reward_model(margin=m, center=0.01)", "TRL", "reward_model", {"center_rewards_coefficient": 0.01}, PAIRS),
    Row("reward_model(weight=pairs * wt)", "ReaL", "reward_model", {"sizes": [2, 3, 1, 1]}, ("seven pairs",)),
    Row("dpo(ref_chosen=rw, ref_rejected=rl, beta=0.3)", "ReaL", "dpo", {"beta": 0.3}, PAIRS),
    Row("dpo(ref_chosen=rw, ref_rejected=rl, beta=0.3)", "TRL", "dpo", {"beta": 0.3}, PAIRS),
    Row("dpo(ref_chosen=rw, ref_rejected=rl, beta=0.3)", "OpenRLHF", "dpo", {"model.beta": 0.3}, PAIRS),
    Row("dpo(ref_chosen=rw, ref_rejected=rl, beta=0.3, smoothing=0.2)", "OpenRLHF", "dpo",
        {"model.beta": 0.3, "model.label_smoothing": 0.2}, PAIRS),
    Row("dpo(ref_chosen=rw, ref_rejected=rl, beta=0.3, smoothing=0.2)", "TRL", "dpo",
        {"beta": 0.3, "label_smoothing": 0.2}, PAIRS, same=False),
    Row("dpo(ref_chosen=rw, ref_rejected=rl, beta=0.3, nll=0.7)", "OpenRLHF", "dpo",
        {"model.beta": 0.3, "model.nll_loss_coef": 0.7}, PAIRS),
    Row("ipo(ref_chosen=rw, ref_rejected=rl, tau=0.3)", "OpenRLHF", "dpo",
        {"model.beta": 0.3, "model.ipo_enable": True}, PAIRS),
    Row("ipo(ref_chosen=rw, ref_rejected=rl, tau=0.3, average=true)", "TRL", "dpo", {"beta": 0.3, "loss_type": "ipo"},
        PAIRS),
    pair_loss(f"hinge({BOTH})", "hinge"),
    pair_loss(f"robust({BOTH}, smoothing=0.2)", "robust", label_smoothing=0.2),
    pair_loss(f"exo({BOTH}, smoothing=0.05)", "exo_pair", label_smoothing=0.05),
    pair_loss(f"discopop({BOTH})", "discopop"),
    pair_loss(f"nca({BOTH})", "nca_pair"),
    pair_loss(f"bco_pair({BOTH})", "bco_pair"),
    pair_loss(f"sppo_hard({BOTH})", "sppo_hard"),
    pair_loss(f"apo_zero({BOTH})", "apo_zero"),
    pair_loss(f"apo_down({BOTH})", "apo_down"),
    pair_loss(f"aot({BOTH})", "aot"),
    pair_loss(f"aot({BOTH}, smoothing=0.2)", "aot", label_smoothing=0.2),
    pair_loss(f"aot_unpaired({BOTH})", "aot_unpaired"),
    pair_loss(f"dpo({BOTH}, average=true)", "sigmoid_norm"),
    pair_loss(f'f_dpo({BOTH}, divergence="forward_kl")', "sigmoid", f_divergence_type="forward_kl"),
    pair_loss(f'f_dpo({BOTH}, divergence="jensen_shannon")', "sigmoid", f_divergence_type="js_divergence"),
    pair_loss(f'f_dpo({BOTH}, divergence="alpha", alpha=0.7)', "sigmoid", f_divergence_type="alpha_divergence",
              f_alpha_divergence_coef=0.7),
    pair_loss(f"ld_dpo({BOTH}, alpha=0.4)", "sigmoid", ld_alpha=0.4),
    pair_loss("wpo(ref_chosen=rw, ref_rejected=rl, weight=wt, beta=0.3, most=1e30)", "sigmoid", use_weighting=True),
    Row("alphapo(beta=1.5, gamma=0.4, alpha=-0.5, nll=0.3)", "TRL", "cpo",
        {"loss_type": "simpo", "beta": 1.5, "simpo_gamma": 0.4, "alpha": -0.5, "cpo_alpha": 0.3}, PAIRS),
    Row("simpo(beta=2.5, gamma=1.4, smoothing=0.1, nll=0.6)", "TRL", "cpo",
        {"loss_type": "simpo", "beta": 2.5, "simpo_gamma": 1.4, "label_smoothing": 0.1, "cpo_alpha": 0.6}, PAIRS),
    Row("kto(ref=ref, label=label, z0=kto_baseline(y, ref), desirable=1.2, undesirable=0.9)", "TRL", "kto",
        {"desirable_weight": 1.2, "undesirable_weight": 0.9}),
    Row("tpo(index=index, beta=0.3)", "TRL", "tpo", {"beta": 0.3}),
    Row("tpo(index=index, beta=0.3, alpha=0.5, smoothing=0.2)", "TRL", "tpo",
        {"beta": 0.3, "tpo_alpha": 0.5, "label_smoothing": 0.2}),
    Row("tpo(index=index, beta=2, gamma=0.5, average=true)", "TRL", "tpo",
        {"beta": 2, "loss_type": "tpo-l", "tpo_l_gamma": 0.5}),
    Row("gkd(teacher=d, beta=0)", "TRL", "gkd", {"beta": 0}, ("vocabulary",)),
    Row("gkd(teacher=d, beta=1)", "TRL", "gkd", {"beta": 1}, ("vocabulary",)),
    Row("gkd(teacher=d)", "TRL", "gkd", batches=("vocabulary",)),
    Row("sdft(teacher=d, old=old)", "TRL", "sdft", {"distillation_mode": "full_logits"}, ("vocabulary",)),
    Row("sdft(teacher=d, old=old, alpha=0)", "TRL", "sdft",
        {"distillation_mode": "full_logits", "distillation_alpha": 0.0}, ("vocabulary",)),
    Row("sdft(teacher=d, old=old, alpha=1)", "TRL", "sdft",
        {"distillation_mode": "full_logits", "distillation_alpha": 1.0}, ("vocabulary",)),
    Row("sdft(teacher=at, old=old)", "TRL", "sdft", {"distillation_topk": 4}, ("vocabulary",)),
    Row('sdft(teacher=at, old=old, others="rest")', "TRL", "sdft",
        {"distillation_topk": 4, "distillation_add_tail": True}, ("vocabulary",)),
    Row("sdft(teacher=at, old=old, skip=2)", "TRL", "sdft",
        {"distillation_topk": 4, "num_loss_tokens_to_skip": 2}, ("vocabulary",)),
    Row("sdft_sampled(teacher=teacher, old=old)", "TRL", "sdft",
        {"distillation_mode": "sampled_token", "distillation_alpha": 1.0}, ("vocabulary",)),
    Row("orpo(lam=0.1, by_token=true)", "TRL", "orpo", batches=PAIRS),
)
ROWS = (*POLICY, *PREFERENCE)
