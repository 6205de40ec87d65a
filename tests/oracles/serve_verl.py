"""verl's own numbers: its losses through `ppo_loss` and `value_loss` as its workers call them, its advantage
estimators, KL penalty, rollout correction and reward manager, with the defaults of its configuration classes.

A case's options set fields of `ActorConfig` (and `policy_loss`), `CriticConfig` or `AlgoConfig` besides those defaults.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import stubs
from wire import Case, Oracle, Output, serve

stubs.install("PIL", "accelerate", "aiohttp", "cachetools", "codetiming", "datasets", "fastapi", "pandas", "peft",
              "psutil", "pydantic", "pylatexenc", "ray", "torchdata", "tqdm", "transformers", "uvicorn", "wandb")

import numpy as np  # noqa: E402
from verl import DataProto  # noqa: E402
from verl.trainer.config import AlgoConfig  # noqa: E402
from verl.trainer.config.algorithm import RolloutCorrectionConfig  # noqa: E402
from verl.trainer.ppo import core_algos  # noqa: E402
from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_advantage  # noqa: E402
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch  # noqa: E402
from verl.utils.torch_functional import masked_whiten  # noqa: E402
from verl.workers.config import ActorConfig, CriticConfig, PolicyLossConfig  # noqa: E402
from verl.workers.reward_manager.dapo import DAPORewardManager  # noqa: E402
from verl.workers.utils import losses  # noqa: E402

# The workers hold sequences without padding; the cases are padded already.
losses.no_padding_2_padding = lambda x, data: x


class Batch(dict[str, Any]):
    """What the loss functions ask of a TensorDict."""

    def select(self, *names: str) -> Batch:
        return Batch({name: self[name] for name in names})

    def to_padded_tensor(self) -> Batch:
        return self


def batch_of(case: Case, **columns: Tensor) -> Batch:
    totals = dict(dp_size=1, batch_num_tokens=None, global_batch_size=None)
    return Batch(response_mask=case.mask().double(), **columns, **totals)


def actor(options: dict[str, Any]) -> ActorConfig:
    own = dict(options)
    policy = PolicyLossConfig(**own.pop("policy_loss", {}))
    return ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=policy, **own)


def policy_loss(case: Case) -> Output:
    """The loss of the actor, the KL term included where `use_kl_loss` is set. Advantages of tokens, or of sequences."""
    level = case.levels["adv"][0] if "adv" in case.levels else "seq"
    adv = case.table("adv") if level == "token" else case.seq("r")[:, None] * case.mask()
    columns = dict(old_log_probs=case.table("old"), advantages=adv)
    if "ref" in case.levels:
        columns["ref_log_prob"] = case.table("ref")
    loss, _ = losses.ppo_loss(actor(case.options), {"log_probs": case.table("x")}, batch_of(case, **columns))
    return loss


def clip_cov_loss(case: Case) -> Output:
    """With a share of 1 nothing is left to chance: every token between the bounds is picked."""
    return policy_loss(case)


def kl_cov_loss(case: Case) -> Output:
    return policy_loss(case)


def kl_cov_choice(case: Case) -> Output:
    """The tokens whose gradient grows with the coefficient, where the policy is `old` and moved up by 1 throughout."""
    options = case.options["policy_loss"]
    config = lambda coef: actor({"policy_loss": options | {"ppo_kl_coef": coef}})  # noqa: E731
    columns = dict(old_log_probs=case.table("old") - 1, advantages=case.table("adv"))
    grads = []
    for coef in (0.1, 0.2):
        fresh = case.table("old").detach().requires_grad_(True)
        loss, _ = losses.ppo_loss(config(coef), {"log_probs": fresh}, batch_of(case, **columns))
        grads.append(torch.autograd.grad(loss, fresh)[0])
    return (grads[0] != grads[1]).double()


def estimated_loss(case: Case) -> Output:
    """The loss with the advantages that an estimator makes of the rewards."""
    own = dict(case.options)
    loss = own.pop("policy_loss")
    case.options = own
    adv = estimated(case, scores(case)).batch["advantages"]
    columns = dict(old_log_probs=torch.zeros(adv.shape), advantages=adv)
    return losses.ppo_loss(actor({"policy_loss": loss}), {"log_probs": case.table("x")}, batch_of(case, **columns))[0]


def corrected_loss(case: Case) -> Output:
    """The loss with importance weights between the sampler (`old`) and the trainer (`lp`)."""
    data = DataProto.from_dict(tensors=dict(old_log_probs=case.table("lp"), rollout_log_probs=case.table("old"),
                                            response_mask=case.mask().double()))
    own = dict(case.options)
    data, _ = compute_rollout_correction_and_add_to_batch(data, RolloutCorrectionConfig(**own.pop("correction")))
    columns = dict(old_log_probs=case.table("lp"), advantages=case.table("adv"),
                   rollout_is_weights=data.batch["rollout_is_weights"])
    loss, _ = losses.ppo_loss(actor(own), {"log_probs": case.table("x")}, batch_of(case, **columns))
    return loss


def value_loss(case: Case) -> Output:
    config = CriticConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=1, **case.options)
    data = batch_of(case, values=case.table("v"), returns=case.table("ret"))
    return losses.value_loss(config, {"values": case.table("x")}, data)[0]


def whiten(case: Case) -> Output:
    return masked_whiten(case.table("adv"), case.mask().double())


def scores(case: Case, **columns: Tensor) -> DataProto:
    """A batch whose reward of a sequence is at its last token. columns: what else it has."""
    tensors = dict(token_level_scores=case.at_last("r"), token_level_rewards=case.at_last("r"),
                   response_mask=case.mask().double())
    return DataProto.from_dict(tensors=tensors | columns, non_tensors={"uid": np.array(case.groups(), dtype=object)})


def algorithm(options: dict[str, Any]) -> AlgoConfig:
    own = dict(options)
    config = AlgoConfig(**{k: v for k, v in own.items() if k != "kl_ctrl"})
    return replace(config, kl_ctrl=replace(config.kl_ctrl, **own.get("kl_ctrl", {})))


def penalised(case: Case) -> tuple[DataProto, Any]:
    """The batch after the KL penalty, and the controller of its coefficient."""
    config = algorithm(case.options)
    controller = core_algos.get_kl_controller(config.kl_ctrl)
    data = scores(case, old_log_probs=case.table("old"), ref_log_prob=case.table("ref"))
    return apply_kl_penalty(data, controller, config.kl_penalty)[0], controller


def kl_rewards(case: Case) -> Output:
    return penalised(case)[0].batch["token_level_rewards"]


def adaptive_kl(case: Case) -> Output:
    return torch.tensor([float(penalised(case)[1].value)])


def estimated(case: Case, data: DataProto) -> DataProto:
    config = algorithm(case.options)
    return compute_advantage(data, config.adv_estimator, config.gamma, config.lam, 1, config.norm_adv_by_std_in_grpo,
                             config)


def gae(case: Case) -> Output:
    """Advantages before they are normalised, and returns."""
    data = scores(case, values=case.table("v"))
    data.batch["token_level_rewards"] = case.table("rt")
    returns = estimated(case, data).batch["returns"]
    return returns - case.table("v"), returns


def advantage(case: Case) -> Output:
    """Of sequences: the number that every token of a sequence has."""
    extra = {"reward_baselines": case.seq("r2")} if "r2" in case.levels else {}
    return case.per_seq(estimated(case, scores(case, **extra)).batch["advantages"])


def token_advantage(case: Case) -> Output:
    return estimated(case, scores(case)).batch["advantages"]


def token_baseline(case: Case) -> Output:
    """Rewards of tokens, `rt`; log-probabilities and sums of squares before the step."""
    data = scores(case, old_log_probs=case.table("old"), sum_pi_squared=case.table("sq"))
    data.batch["token_level_rewards"] = case.table("rt")
    return estimated(case, data).batch["advantages"]


def gdpo(case: Case) -> Output:
    """Two rewards. The batch needs prompts and an attention mask: one token of prompt each."""
    ones = torch.ones(case.rows, 1, dtype=torch.long)
    data = scores(case, prompts=ones, attention_mask=torch.cat([ones, case.mask().long()], 1))
    data.non_tensor_batch |= {name: case.seq(name).numpy() for name in ("r", "r2")}
    return estimated(case, data).batch["advantages"]


def reinforce_pp(case: Case) -> Output:
    """REINFORCE++ after the KL penalty."""
    return estimated(case, penalised(case)[0]).batch["advantages"]


def overlong(case: Case) -> Output:
    """The reward of DAPO's manager, whose score of a response is the case's."""
    rewards = iter(case.seq("r").tolist())
    buffer = SimpleNamespace(enable=True, log=False, **case.options["buffer"])
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "", eos_token="")
    score = lambda **kwargs: next(rewards)  # noqa: E731
    manager = DAPORewardManager(tokenizer, 0, score, "data_source", case.options["most"], buffer)
    ones, mask = torch.ones(case.rows, 1, dtype=torch.long), case.mask().long()
    data = DataProto.from_dict(
        tensors=dict(prompts=ones, responses=mask, attention_mask=torch.cat([ones, mask], 1)),
        non_tensors=dict(reward_model=np.array([{"ground_truth": ""}] * case.rows, dtype=object),
                         data_source=np.array(["x"] * case.rows, dtype=object)))
    return manager(data)[case.mask() & (torch.arange(max(case.main)) == torch.tensor(case.main)[:, None] - 1)]


ORACLES: dict[str, Oracle] = {
    f.__name__: f for f in (policy_loss, clip_cov_loss, kl_cov_loss, kl_cov_choice, estimated_loss, corrected_loss,
                            value_loss, whiten, kl_rewards, adaptive_kl, gae, advantage, token_advantage, token_baseline, gdpo,
                            reinforce_pp, overlong)}

if __name__ == "__main__":
    serve(ORACLES, ["verl"])
