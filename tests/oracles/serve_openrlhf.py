"""OpenRLHF's own numbers: the training step of its actor, the advantages of its experience maker, and its loss modules,
with the defaults of its command line.

A case's options are arguments of that command line ("algo.kl.init_coef"), set besides the defaults.
"""

from __future__ import annotations

import argparse
import runpy
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import stubs
from wire import Case, Oracle, Output, everything, serve

stubs.install("PIL", "accelerate", "aiohttp", "bitsandbytes", "datasets", "deepspeed", "flash_attn", "jsonlines",
              "optree", "peft", "pylatexenc", "ray", "torchdata", "tqdm", "transformers", "vllm")

from openrlhf.models import loss as models  # noqa: E402
from openrlhf.models.utils import compute_approx_kl, masked_mean  # noqa: E402
from openrlhf.trainer.dpo_trainer import DPOTrainer  # noqa: E402
from openrlhf.trainer.ppo_utils import AdaptiveKLController, Experience  # noqa: E402
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker  # noqa: E402
from openrlhf.trainer.ppo_utils.length_penalty import apply_overlong_penalty  # noqa: E402
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer  # noqa: E402
from openrlhf.utils.config import hierarchize  # noqa: E402


class _Parsed(Exception):
    """Carries the parser out of the command, before the command does anything."""

    def __init__(self, parser: argparse.ArgumentParser):
        self.parser = parser


def _defaults(command: str) -> dict[str, Any]:
    def stop(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        raise _Parsed(parser)

    with mock.patch.object(argparse.ArgumentParser, "parse_args", stop):
        try:
            runpy.run_module(command, run_name="__main__")
        except _Parsed as stopped:
            return {a.dest: a.default for a in stopped.parser._actions}
    raise RuntimeError(f"{command} did not parse its command line")


COMMANDS = {name: _defaults(f"openrlhf.cli.{name}") for name in ("train_ppo_ray", "train_dpo", "train_rm", "train_sft")}


def args_of(case: Case, command: str = "train_ppo_ray") -> Any:
    """The arguments as the trainers read them: `args.algo.kl.init_coef`."""
    known = COMMANDS[command]
    if unknown := set(case.options) - set(known):
        raise KeyError(f"{command} has no {unknown}")
    args = hierarchize(argparse.Namespace(**(known | case.options)))
    if command == "train_ppo_ray" and args.actor.eps_clip_low_high is None:  # as the command does after parsing
        args.actor.eps_clip_low_high = (args.actor.eps_clip, args.actor.eps_clip)
    return args


def actor_loss(case: Case) -> Output:
    """The loss that one training step of the actor sends backward. `lp`, where there is one, is the trainer's old
    log-probability and `old` the sampler's."""
    args = args_of(case)
    level = case.levels["adv"][0] if "adv" in case.levels else "seq"
    adv = case.table("adv") if level == "token" else case.seq("r")[:, None] * case.mask()
    trained = "lp" if "lp" in case.levels else "old"
    mask = case.mask()
    experience = Experience(
        sequences=mask.long(), action_mask=mask, attention_mask=mask, advantages=adv, info={},
        action_log_probs=case.table(trained), rollout_log_probs=case.table("old"),
        base_action_log_probs=case.table("ref") if "ref" in case.levels else None)
    sent: list[Tensor] = []
    me = mock.MagicMock()
    me.args, me.aux_loss, me.ema_model, me.replay_buffer = args, False, None, None
    me.actor.side_effect = lambda *a, **k: (case.table("x"), None)
    me.strategy.backward.side_effect = lambda loss, *rest: sent.append(loss)
    me.strategy.ds_device_mesh = None
    me.actor_loss_fn = models.PolicyLoss(
        clip_eps_low=args.actor.eps_clip_low_high[0], clip_eps_high=args.actor.eps_clip_low_high[1],
        dual_clip=args.actor.dual_clip, token_level_loss=args.actor.loss_agg_mode == "token-mean",
        policy_loss_type=args.actor.policy_loss_type,
        is_correction_level=args.algo.advantage.is_correction_level,
        is_correction_mode=args.algo.advantage.is_correction_mode,
        is_correction_gating=args.algo.advantage.is_correction_gating,
        is_correction_threshold=args.algo.advantage.is_correction_threshold)
    ActorPPOTrainer.training_step(me, experience, args.algo.kl.init_coef, 0, None)
    return sent[0]


def value_loss(case: Case) -> Output:
    loss = models.ValueLoss(args_of(case).critic.value_clip)
    return loss(case.table("x"), case.table("v"), case.table("ret"), action_mask=case.mask())


def maker(case: Case, args: Any) -> Any:
    me = everything(strategy=everything(args=args), advantage_estimator=args.algo.advantage.estimator,
                    kl_ctl=everything(value=args.algo.kl.init_coef))
    for name in ("get_advantages_and_returns", "get_cumulative_returns"):
        setattr(me, name, getattr(RemoteExperienceMaker, name).__get__(me))
    return me


def experience_of(case: Case, args: Any) -> Any:
    """One batch of the experience maker, with the KL estimate that it computes itself."""
    mask = case.mask()
    if "ref" in case.levels and not args.algo.kl.use_loss:
        kl = compute_approx_kl(case.table("old"), case.table("ref"), kl_estimator=args.algo.kl.estimator)
    else:
        kl = torch.zeros(mask.shape)
    return everything(rewards=case.seq("r"), index=list(range(case.rows)), action_mask=mask, kl=kl, info={},
                      values=case.table("v") if "v" in case.levels else None, truncated=None,
                      response_length=torch.tensor(case.main))


def advantage(case: Case) -> Output:
    """Advantages of tokens, KL penalty and normalisation as the estimator has them."""
    args = args_of(case)
    args.rollout.n_samples_per_prompt = case.n
    (done,) = RemoteExperienceMaker.compute_advantages_and_returns(maker(case, args), [experience_of(case, args)])
    return done.advantages


def plain_advantage(case: Case) -> Output:
    """Of sequences: the number that every token of a sequence has, without a KL penalty in the reward."""
    return case.per_seq(advantage(case))


def gae(case: Case) -> Output:
    args = args_of(case).algo.advantage
    return RemoteExperienceMaker.get_advantages_and_returns(
        None, case.table("v"), case.table("rt"), case.mask(), args.gamma, args.lambd)


def kl_rewards(case: Case) -> Output:
    """The rewards of tokens, where the experience maker sums them up: the discounted return with a discount of 0."""
    args = args_of(case)
    args.rollout.n_samples_per_prompt = case.n
    args.algo.advantage.estimator, args.algo.advantage.gamma = "reinforce", 0.0
    args.algo.advantage.no_std_norm = True
    (done,) = RemoteExperienceMaker.compute_advantages_and_returns(maker(case, args), [experience_of(case, args)])
    return done.returns


def whiten(case: Case) -> Output:
    """The normalisation of the experience maker, reached with rewards that are the advantages: the reward of each token
    as a KL penalty of -1, and a discount of 0."""
    args = args_of(case)
    args.rollout.n_samples_per_prompt = case.n
    args.algo.advantage.estimator, args.algo.advantage.gamma, args.algo.kl.init_coef = "reinforce", 0.0, 1.0
    experience = experience_of(case, args)
    experience.kl, experience.rewards = -case.table("adv"), torch.zeros(case.rows)
    (done,) = RemoteExperienceMaker.compute_advantages_and_returns(maker(case, args), [experience])
    return done.advantages


def adaptive_kl(case: Case) -> Output:
    """The coefficient after a step whose KL is what the experience maker logs, averaged over sequences."""
    args = args_of(case)
    control = AdaptiveKLController(args.algo.kl.init_coef, args.algo.kl.target, args.algo.kl.horizon)
    mean = masked_mean(experience_of(case, args).kl, case.mask(), dim=-1).mean()
    control.update(float(mean), case.rows)
    return torch.tensor([float(control.value)])


def overlong(case: Case) -> Output:
    experience = everything(rewards=case.seq("r"), response_length=torch.tensor(case.main))
    apply_overlong_penalty([experience], case.options["most"], case.options["buffer"])
    return experience.rewards


def sft(case: Case) -> Output:
    return models.SFTLoss()(case.table("x"), case.mask())


def reward_model(case: Case) -> Output:
    kind = {"sigmoid": models.PairWiseLoss, "logexp": models.LogExpLoss}[args_of(case, "train_rm").model.loss_type]
    return kind()(case.seq("chosen"), case.seq("rejected"))


def dpo(case: Case) -> Output:
    """The loss of one step, preference and likelihood: log-probabilities of tokens behind a prompt of one token."""
    args = args_of(case, "train_dpo")
    me = everything(strategy=everything(ring_attn_group=None), tokenizer=everything(pad_token_id=0))
    for name in ("concatenated_inputs", "_get_batch_logps"):
        setattr(me, name, getattr(DPOTrainer, name).__get__(me))
    sides = ("pair.chosen", "pair.rejected")
    ids = [torch.ones(case.rows, 1 + max(case.lens[side]), dtype=torch.long) for side in sides]
    masks = [torch.cat([torch.ones(case.rows, 1, dtype=torch.bool), case.mask(side)], 1).long() for side in sides]

    def forward(*names: str) -> Any:
        tables = [case.table(name) for name in names]
        longest = max(t.shape[1] for t in tables)
        both = torch.cat([torch.nn.functional.pad(t, (0, longest - t.shape[1])) for t in tables])
        model = lambda *a, **k: (both, {})  # noqa: E731
        return DPOTrainer.concatenated_forward(me, model, ids[0], masks[0], ids[1], masks[1], [1] * case.rows)

    chosen, rejected, _, nll = forward("chosen", "rejected")
    ref_chosen, ref_rejected, _, _ = forward("rw", "rl")
    loss = models.DPOLoss(args.model.beta, args.model.label_smoothing, args.model.ipo_enable)
    preference, _, _ = loss(chosen, rejected, ref_chosen, ref_rejected)
    return preference + nll * args.model.nll_loss_coef


ORACLES: dict[str, Oracle] = {
    f.__name__: f for f in (actor_loss, value_loss, advantage, plain_advantage, gae, kl_rewards, whiten, adaptive_kl,
                            overlong, sft, reward_model, dpo)}

if __name__ == "__main__":
    serve(ORACLES, ["openrlhf"])
