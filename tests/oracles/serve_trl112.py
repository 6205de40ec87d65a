"""The numbers of TRL 1.12, the last version with PPO and GSPO-token.

Its PPO is one method, `PPOTrainer.train`. It runs here as it is, on a trainer without a model, up to the first call of
`accelerator.backward`; the numbers are then read from its own local variables.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from trl_trainers import FOLDER, WORD, loss_of, policy_trainer
from wire import Case, Oracle, Output, serve

from trl import GRPOConfig  # isort: skip
from trl.experimental.gspo_token import GRPOTrainer as GSPOTokenTrainer  # isort: skip
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer  # isort: skip


class _Stopped(Exception):
    """Carries the local variables of `train` out."""

    def __init__(self, known: dict[str, Any]):
        self.known = known


def _stop(loss: Tensor) -> None:
    caller = sys._getframe(1)
    while caller.f_code.co_name != "train":
        caller = caller.f_back
    raise _Stopped(dict(caller.f_locals))


def step(case: Case, old: Tensor, ref: Tensor, values: Tensor, scores: Tensor, fresh: Tensor | None = None,
         fresh_values: Tensor | None = None, whiten: Any = ppo_trainer.masked_whiten, **config: Any) -> dict[str, Any]:
    """The local variables of `train` when it sends its first loss backward. Tables are [rows, longest]."""
    args = PPOConfig(output_dir=FOLDER, use_cpu=True, bf16=False, report_to="none", num_ppo_epochs=1,
                     total_episodes=case.rows, per_device_train_batch_size=case.rows, **(case.options | config))
    args.num_total_batches, args.batch_size = 1, case.rows
    args.local_batch_size = args.local_mini_batch_size = args.local_rollout_forward_batch_size = case.rows
    me = mock.MagicMock()
    me.args, me.stop_token_id, me.is_deepspeed_enabled = args, None, False
    me.processing_class = SimpleNamespace(pad_token_id=0, eos_token_id=1)
    me.train_dataset_len = case.rows
    me.dataloader = [{"input_ids": torch.full((case.rows, 1), WORD)}]
    me.accelerator.device = "cpu"
    me.accelerator.backward.side_effect = _stop
    responses = torch.cat([torch.full((case.rows, 1), WORD), WORD * case.mask().long()], 1)
    table = lambda x: torch.cat([x, torch.zeros(case.rows, 1)], 1)[..., None]  # noqa: E731
    logits = torch.zeros(*responses.shape, 1)
    asked = iter([old, ref, old if fresh is None else fresh])
    outputs = iter([SimpleNamespace(logits=logits.clone()),
                    (SimpleNamespace(logits=logits.clone()), table(values if fresh_values is None else fresh_values))])
    rewarded = iter([(table(values), None, None), (None, scores, None)])

    @contextlib.contextmanager
    def unwrapped(*args: Any, **kwargs: Any) -> Iterator[Any]:
        yield me

    patches = dict(batch_generation=lambda *a: (responses, logits[:, 1:].clone()), forward=lambda *a: next(outputs),
                   selective_log_softmax=lambda *a: next(asked), get_reward=lambda *a: next(rewarded),
                   unwrap_model_for_generation=unwrapped, masked_whiten=whiten)
    with mock.patch.multiple(ppo_trainer, **patches), mock.patch.object(np.random, "permutation", np.arange):
        try:
            PPOTrainer.train(me)
        except _Stopped as stopped:
            return stopped.known
    raise RuntimeError("no loss was sent backward")


def reference(case: Case, old: Tensor, rewards: Tensor) -> Tensor:
    """The reference that makes the KL penalty of each token the reward that is wanted there."""
    return old + rewards / PPOConfig(output_dir=FOLDER, use_cpu=True, bf16=False).kl_coef


def ppo_loss(case: Case) -> Output:
    """With the case's advantages in place of the normalised ones."""
    old, zeros = case.table("old"), torch.zeros(case.mask().shape)
    return step(case, old, old, zeros, torch.zeros(case.rows), case.table("x"),
                whiten=lambda *a: case.table("adv"))["pg_loss"]


def value_loss(case: Case) -> Output:
    """With the case's returns: rewards are their differences, and lambda is 1."""
    old, ret = torch.zeros(case.mask().shape), case.table("ret")
    after = torch.cat([ret[:, 1:], torch.zeros(case.rows, 1)], 1)
    return step(case, old, reference(case, old, ret - after), case.table("v"), torch.zeros(case.rows),
                fresh_values=case.table("x"), lam=1.0)["vf_loss"]


def whiten(case: Case) -> Output:
    """Rewards are the advantages: no values, and lambda is 0."""
    zeros = torch.zeros(case.mask().shape)
    known = step(case, zeros, reference(case, zeros, case.table("adv")), zeros, torch.zeros(case.rows), lam=0.0)
    return known["advantages"]


def gae(case: Case) -> Output:
    old = torch.zeros(case.mask().shape)
    known = step(case, old, reference(case, old, case.table("rt")), case.table("v"), torch.zeros(case.rows))
    return known["returns"] - known["values"], known["returns"]


def kl_rewards(case: Case) -> Output:
    known = step(case, case.table("old"), case.table("ref"), torch.zeros(case.mask().shape), case.seq("r"))
    return known["rewards"]


def gspo_token_loss(case: Case) -> Output:
    """Its subclass reads the level that its base class does not know."""
    level = {"importance_sampling_level": "token"}
    own = case.options
    case.options = own | level
    made = policy_trainer(GSPOTokenTrainer, GRPOConfig, case)
    made.importance_sampling_level = own["importance_sampling_level"]
    return loss_of(made, case, old_per_token_logps=case.table("old"), advantages=case.table("adv"))


ORACLES: dict[str, Oracle] = {
    f.__name__: f for f in (ppo_loss, value_loss, whiten, gae, kl_rewards, gspo_token_loss)}

if __name__ == "__main__":
    serve(ORACLES, ["trl", "transformers"])
