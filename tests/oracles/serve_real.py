"""ReaL's own numbers: the loss functions and training steps of its interfaces, and of the examples that come with it,
with the defaults of its experiment configurations.

Its code wants packed sequences of prompt and response: every prompt here has one token, so a response of n tokens is a
sequence of n + 1 with n log-probabilities, which is how ReaL packs them.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import stubs
from wire import Case, Oracle, Output, everything, serve

stubs.install("accelerate", "aiohttp", "colorama", "datasets", "deepspeed", "einops", "flash_attn", "huggingface_hub",
              "matplotlib", "megatron", "ninja", "numba", "orjson", "pandas", "prettytable", "pyarrow", "pynvml",
              "pytest", "ray", "redis", "safetensors", "scipy", "sentencepiece", "tensorboardX", "tokenizers", "tqdm",
              "transformer_engine", "transformers", "viztracer", "wandb", "zmq")

_dataclass = dataclasses.dataclass


def _hashable(cls: Any = None, /, **options: Any) -> Any:
    """ReaL has defaults that are instances of its own data classes, which Python 3.11 takes only if they have a hash."""
    if cls is None:
        return lambda found: _hashable(found, **options)
    made = _dataclass(cls, **options)
    if made.__hash__ is None:
        made.__hash__ = object.__hash__
    return made


with mock.patch.object(dataclasses, "dataclass", _hashable):
    import examples.new_algorithms.grpo.grpo_interface as grpo_interface
    import examples.new_algorithms.reinforce.reinforce_interface as reinforce_interface
    import realhf.impl.model.interface.dpo_interface as dpo_interface
    import realhf.impl.model.interface.ppo_interface as ppo_interface
    import realhf.impl.model.interface.rw_interface as rw_interface
    from realhf.experiments.common.ppo_exp import PPOHyperparameters
    from realhf.impl.model.utils import dpo_functional, functional, ppo_functional

DEFAULTS = PPOHyperparameters()


class Sample:
    """What the interfaces ask of a `SequenceSample`: packed data by name, lengths, and a split into one part."""

    def __init__(self, data: dict[str, Any], lens: list[list[int]]):
        self.data, self.bs, self.ids = data, len(lens), list(range(len(lens)))
        self.seqlens = {"packed_input_ids": lens}

    def split(self, count: int, min_size: int = 1) -> list[Sample]:
        return [self]

    def update_(self, other: Sample) -> None:
        self.data |= other.data

    @staticmethod
    def from_default(ids: Any, data: dict[str, Any], seqlens: list[Any]) -> Sample:
        return Sample(data, [x if isinstance(x, list) else [x] for x in seqlens])


def _made(keys: Any = None, data: Any = None, seqlens: Any = None, **rest: Any) -> Sample:
    return Sample(data, [])


def packed(case: Case, name: str) -> Tensor:
    return case.flat[name].clone()


def prompts_and(case: Case) -> tuple[list[int], Tensor]:
    """Lengths with the prompt's token, and the mask of prompts over all tokens."""
    lens = [n + 1 for n in case.main]
    return lens, torch.cat([torch.tensor([True] + [False] * n) for n in case.main])


class Recorder:
    """A model whose training step computes the loss and keeps it."""

    def __init__(self) -> None:
        self.loss: Tensor | None = None
        self.module = self
        self.device, self.version = "cpu", SimpleNamespace(global_step=0, epoch=0)

    def eval(self) -> None:
        pass

    def inc_version(self) -> None:
        pass

    def train_batch(self, input_: Sample, loss_fn: Any, **rest: Any) -> None:
        self.loss, _ = loss_fn(torch.zeros(1), input_)


_tensor = torch.tensor


def _on_cpu(data: Any, device: Any = None, **rest: Any) -> Tensor:
    return _tensor(data, **rest)


def patched(case: Case) -> Any:
    """One process, no GPU, and in place of logits the log-probabilities: the fresh ones, or those of sampling."""
    given = lambda *a, **k: packed(case, next(iter(case.leaves), "old"))  # noqa: E731
    return [mock.patch.multiple(ppo_interface, SequenceSample=Sample, gather_packed_shifted_log_probs=given),
            mock.patch.object(torch.Tensor, "cuda", lambda x: x),
            mock.patch.object(torch, "tensor", _on_cpu),
            mock.patch.object(functional, "gather_packed_shifted_log_probs", given),
            mock.patch.object(dpo_interface, "gather_packed_shifted_log_probs", given),
            mock.patch.object(grpo_interface, "SequenceSample", Sample),
            mock.patch.object(reinforce_interface, "SequenceSample", _made),
            mock.patch("torch.distributed.all_reduce", lambda *a, **k: None),
            mock.patch("torch.distributed.all_reduce_coalesced", lambda *a, **k: None),
            *(mock.patch.object(m.constants, name, value)
              for m in (ppo_interface, grpo_interface, reinforce_interface)
              for name, value in (("data_parallel_group", lambda: None), ("pipe_parallel_world_size", lambda: 1),
                                  ("log_global_stats_tracker", lambda **k: {})))]


def run(case: Case, interface: Any, sample: Sample) -> Recorder:
    """A training step of an interface."""
    model = Recorder()
    with_patches(case, lambda: interface.train_step(model, sample))
    return model


def with_patches(case: Case, work: Any) -> Any:
    patches = patched(case)
    for patch in patches:
        patch.start()
    try:
        return work()
    finally:
        for patch in reversed(patches):
            patch.stop()


def ppo_sample(case: Case) -> Sample:
    """What PPO trains on; the value behind the last token is that of a finished sequence."""
    lens, prompt = prompts_and(case)
    every = torch.ones(case.rows, dtype=torch.bool)
    ended = case.seq("gen.finished").bool() if "gen.finished" in case.levels else every
    values = case.split("v") if "v" in case.levels else [torch.zeros(n) for n in case.main]
    return Sample(dict(
        packed_logprobs=packed(case, "old"), packed_ref_logprobs=packed(case, "ref"), prompt_mask=prompt,
        rewards=case.seq("r"), values=torch.cat([torch.cat([v, torch.zeros(1)]) for v in values]),
        seq_no_eos_mask=~ended, packed_input_ids=torch.zeros(len(prompt), dtype=torch.long), packed_logits_mask=None),
        [[n] for n in lens])


def ppo(case: Case) -> ppo_interface.PPOActorInterface:
    d = DEFAULTS
    known = dict(n_minibatches=1, kl_ctl=d.kl_ctl, discount=d.discount, gae_lambda=d.gae_lambda, eps_clip=d.eps_clip,
                 value_eps_clip=d.value_eps_clip, max_reward_clip=d.max_reward_clip, adv_norm=d.adv_norm,
                 early_stop_imp_ratio=d.early_stop_imp_ratio, adaptive_kl_ctl=d.use_adaptive_kl_ctl)
    return ppo_interface.PPOActorInterface(**(known | case.options))


def actor_loss(case: Case) -> Output:
    """The loss of one micro-batch, early stop included."""
    lens, prompt = prompts_and(case)
    sample = Sample(dict(packed_logits_mask=None, packed_input_ids=torch.zeros(len(prompt), dtype=torch.long),
                         ppo_loss_mask=torch.ones(sum(case.main), dtype=torch.bool), advantages=packed(case, "adv"),
                         old_logp=packed(case, "old"), kl_rewards=torch.zeros(sum(case.main))), [[n] for n in lens])
    me = ppo(case)
    return with_patches(case, lambda: ppo_interface._ppo_actor_loss_from_model_outputs(
        None, sample, me.kl_adapter, me.eps_clip, me.early_stop_imp_ratio, me.early_stop_kl))[0]


def value_loss(case: Case) -> Output:
    ones = torch.ones(sum(case.main), dtype=torch.bool)
    return ppo_functional.critic_loss_fn(packed(case, "x"), packed(case, "v"), packed(case, "ret"),
                                         DEFAULTS.value_eps_clip, ones)[0]


def starts(case: Case) -> Tensor:
    return torch.tensor([0, *case.main]).cumsum(0).int()


def gae(case: Case) -> Output:
    values = torch.cat([torch.cat([v, torch.zeros(1)]) for v in case.split("v")])
    return ppo_functional.get_packed_advantages_and_returns(DEFAULTS.discount, DEFAULTS.gae_lambda, values,
                                                            packed(case, "rt"), starts(case), torch.zeros(case.rows))


def whiten(case: Case) -> Output:
    return functional.masked_normalization(packed(case, "adv"), torch.ones(sum(case.main), dtype=torch.bool))


def kl_rewards(case: Case) -> Output:
    """The rewards of tokens, inside a training step of PPO."""
    seen: list[Tensor] = []
    own = ppo_functional.get_packed_rewards

    def record(**arguments: Any) -> Any:
        kl, rewards = own(**arguments)
        seen.append(rewards.clone())
        return kl, rewards

    with mock.patch.object(ppo_functional, "get_packed_rewards", record):
        run(case, ppo(case), ppo_sample(case))
    return seen[0]


def adaptive_kl(case: Case) -> Output:
    """The coefficient after one micro-batch of a training step whose rewards have the KL penalty."""
    me = ppo(case)
    run(case, me, ppo_sample(case))
    return torch.tensor([float(me.kl_adapter.value)])


def grpo(case: Case, **known: Any) -> grpo_interface.GRPOInterface:
    d = DEFAULTS
    defaults = dict(group_size=case.n, n_minibatches=1, kl_ctl=d.kl_ctl, discount=d.discount, eps_clip=d.eps_clip,
                    max_reward_clip=d.max_reward_clip, adv_norm=d.adv_norm, early_stop_imp_ratio=d.early_stop_imp_ratio,
                    generation_config=everything(force_no_logits_mask=True))
    return grpo_interface.GRPOInterface(**(defaults | case.options | known))


def grpo_advantage(case: Case) -> Output:
    """The advantages that a training step of the GRPO example computes."""
    lens, prompt = prompts_and(case)
    sample = Sample(dict(rewards=case.seq("r"), prompt_mask=prompt, packed_logprobs=packed(case, "old"),
                         packed_ref_logprobs=packed(case, "old"), packed_logits_mask=None,
                         packed_input_ids=torch.zeros(len(prompt), dtype=torch.long)),
                    [lens[i : i + case.n] for i in range(0, len(lens), case.n)])
    model = Recorder()
    seen: list[Any] = []
    model.train_batch = lambda input_, **rest: seen.append(input_.data["advantages"])  # type: ignore[method-assign]
    with_patches(case, lambda: stopped_after(lambda: grpo(case).train_step(model, sample), seen))
    return seen[0]


def stopped_after(work: Any, seen: list[Any]) -> None:
    """The statistics after the training step fail without any; what was to be seen has been by then."""
    try:
        work()
    except Exception:
        if not seen:
            raise


def grpo_loss(case: Case) -> Output:
    lens, prompt = prompts_and(case)
    sample = Sample(dict(packed_logits_mask=None, packed_input_ids=torch.zeros(len(prompt), dtype=torch.long),
                         ppo_loss_mask=torch.ones(sum(case.main), dtype=torch.bool), advantages=packed(case, "adv"),
                         old_logp=packed(case, "old"), ref_logp=packed(case, "ref")), [[n] for n in lens])
    me = grpo(case)
    return with_patches(case, lambda: grpo_interface._grpo_loss(
        None, sample, me.kl_adapter, me.eps_clip, me.early_stop_imp_ratio, me.early_stop_kl))[0]


def remax(case: Case) -> Output:
    """The loss of a training step of the REINFORCE example, from the rewards of samples and of greedy answers."""
    lens, prompt = prompts_and(case)
    sample = Sample(dict(rewards=case.seq("r"), greedy_rewards=case.seq("r2"), prompt_mask=prompt,
                         packed_input_ids=torch.zeros(len(prompt), dtype=torch.long), packed_logits_mask=None),
                    [[n] for n in lens])
    me = reinforce_interface.ReinforceInterface(**case.options)
    model = Recorder()
    with_patches(case, lambda: me.train_step(model, sample))
    return model.loss


def dpo(case: Case) -> Output:
    """Pairs side by side."""
    sums = {name: torch.stack([x.sum() for x in case.split(name)]) for name in ("chosen", "rejected", "rw", "rl")}
    pairs = lambda a, b: torch.stack([sums[a], sums[b]], 1).view(-1)  # noqa: E731
    return dpo_functional.dpo_loss(pairs("chosen", "rejected"), pairs("rw", "rl"), case.options["beta"])[0]


def reward_model(case: Case) -> Output:
    """Scores at the last token of each sequence; the pairs of a prompt are `sizes`."""
    sizes: list[int] = case.options["sizes"]
    scores = torch.stack([case.seq("chosen"), case.seq("rejected")], 1).view(-1)
    lens = [[1] * (2 * size) for size in sizes]
    return with_patches(case, lambda: rw_interface._paired_rw_loss_from_model_outputs(scores, Sample({}, lens)))[0]


ORACLES: dict[str, Oracle] = {
    f.__name__: f for f in (actor_loss, value_loss, gae, whiten, kl_rewards, adaptive_kl, grpo_advantage, grpo_loss,
                            remax, dpo, reward_model)}

if __name__ == "__main__":
    serve(ORACLES, ["realhf"])
