"""TRL's own numbers: real trainers, made with their own configurations and a tiny random model, whose losses and
advantages are computed from the log-probabilities, rewards and scores of a case instead of the model's.

A case's options are fields of the trainer's configuration, set besides its defaults.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from trl_trainers import COMMON, TINY, WORD, loss_of, policy_trainer, saved_model, tokenizer
from wire import Case, Oracle, Output, serve

from datasets import Dataset  # isort: skip
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification  # isort: skip
from trl import (DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, RewardConfig,  # isort: skip
                 RewardTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer)
from trl.experimental.cpo import CPOConfig, CPOTrainer  # isort: skip
from trl.experimental.gkd import GKDTrainer  # isort: skip
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer  # isort: skip
from trl.experimental.orpo import ORPOConfig, ORPOTrainer  # isort: skip
from trl.experimental.sdft import SDFTConfig, SDFTTrainer  # isort: skip
from trl.experimental.sdft.sdft_trainer import DistillationLogits  # isort: skip
from trl.experimental.tpo import TPOConfig, TPOTrainer  # isort: skip

W, L = "pair.chosen", "pair.rejected"
PAIRS = Dataset.from_dict({"prompt": ["a"] * 4, "chosen": ["b"] * 4, "rejected": ["c"] * 4})


class Held(torch.nn.Module):
    """A model whose output is given: `outputs` in turn, one for each call."""

    def __init__(self, *outputs: Any):
        super().__init__()
        self.outputs, self.calls = outputs, 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.outputs[(self.calls - 1) % len(self.outputs)]


def logits_of(table: Tensor) -> Tensor:
    """[rows, time, 2]: logits whose log-softmax at 0 is the table, with its gradient."""
    safe = table.clamp(max=-1e-12)
    return torch.stack([safe, torch.log(-torch.expm1(safe))], -1)


# ------------------------------------------------------------------------------------------------- policy gradient


def grpo_loss(case: Case) -> Output:
    """Advantages of tokens ("adv") or of sequences ("r")."""
    adv = case.table("adv") if "adv" in case.levels and case.levels["adv"][0] == "token" else case.seq("r")
    inputs = dict(old_per_token_logps=case.table("old"), advantages=adv)
    if "ref" in case.levels:
        inputs["ref_per_token_logps"] = case.table("ref")
    return loss_of(policy_trainer(GRPOTrainer, GRPOConfig, case), case, **inputs)


def gmpo_loss(case: Case) -> Output:
    return loss_of(policy_trainer(GMPOTrainer, GMPOConfig, case), case, old_per_token_logps=case.table("old"),
                   advantages=case.seq("r"))


def scored(made: Any, case: Case, logps: list[Tensor]) -> dict[str, Tensor]:
    """What the trainer makes of generated completions: their rewards are the case's, their log-probabilities `logps`,
    one table for each time the trainer asks a model."""
    ids = [[WORD] * n for n in case.main]
    sampled = [x.tolist() for x in case.split("old")] if "lp" in case.levels else None
    texts = [""] * case.rows
    prompts = [[WORD]] * case.rows
    generated = {GRPOTrainer: (prompts, ids, None, texts, sampled, {}, None, None),
                 RLOOTrainer: (prompts, ids, texts)}[type(made)]
    made._generate = lambda *a, **k: generated
    names = ["r", "r2"] if "r2" in case.levels else ["r"]
    made._calculate_rewards = lambda *a, **k: torch.stack([case.seq(name) for name in names], 1)
    tables = iter(logps)
    made._get_per_token_logps_and_entropies = lambda *a, **k: (next(tables), None, None)
    return made._generate_and_score_completions([{"prompt": "a"}] * case.rows)


def grpo_advantage(case: Case) -> Output:
    return scored(policy_trainer(GRPOTrainer, GRPOConfig, case), case, [])["advantages"]


def rloo_advantage(case: Case) -> Output:
    made = policy_trainer(RLOOTrainer, RLOOConfig, case)
    return scored(made, case, [case.table("old"), case.table("ref")])["advantages"]


def rloo_loss(case: Case) -> Output:
    return loss_of(policy_trainer(RLOOTrainer, RLOOConfig, case), case, old_logps=case.table("old").sum(1),
                   advantages=case.seq("r"))


def corrected_loss(case: Case) -> Output:
    """The sampler's log-probabilities are `old`, the trainer's before the step `lp`."""
    made = policy_trainer(GRPOTrainer, GRPOConfig, case)
    weight = scored(made, case, [case.table("lp")])["importance_sampling_ratio"]
    return loss_of(made, case, old_per_token_logps=case.table("lp"), advantages=case.table("adv"),
                   importance_sampling_ratio=weight)


# --------------------------------------------------------------------------------------- supervised and preference


def shifted(mask: Tensor) -> Tensor:
    """Behind a prompt of one token."""
    return torch.cat([torch.zeros(len(mask), 1, dtype=torch.long), mask.long()], 1)


def unused(mask: Tensor) -> dict[str, Tensor]:
    """What a model's output has for the trainer's metrics."""
    zeros = torch.zeros(mask.shape)
    return dict(label_mask=mask.bool(), is_top1=mask.bool(), entropy=zeros, mean_logits=zeros)


def padded(tables: list[Tensor]) -> Tensor:
    longest = max(t.shape[1] for t in tables)
    return torch.cat([torch.nn.functional.pad(t, (0, longest - t.shape[1])) for t in tables])


def both(case: Case, chosen: str, rejected: str) -> Tensor:
    return padded([case.table(chosen), case.table(rejected)])


def sft(case: Case) -> Output:
    made = SFTTrainer(model=saved_model(), args=SFTConfig(**COMMON, **case.options), processing_class=tokenizer(),
                      train_dataset=Dataset.from_dict({"text": ["a b"] * 4}))
    ids = shifted(case.mask())
    output = SimpleNamespace(log_probs=case.table("x"), **unused(case.mask()))
    return made.compute_loss(Held(output), {"input_ids": ids, "labels": ids, "attention_mask": ids})


def dpo(case: Case) -> Output:
    made = DPOTrainer(model=saved_model(), args=DPOConfig(**COMMON, **case.options), processing_class=tokenizer(),
                      train_dataset=PAIRS)
    mask = padded([case.mask(W).long(), case.mask(L).long()])
    made.ref_model = Held(SimpleNamespace(log_probs=both(case, "rw", "rl")))
    output = SimpleNamespace(log_probs=both(case, "chosen", "rejected"), **unused(mask))
    if "sw" in case.levels:  # of all probabilities, for the weights of WPO
        output.log_sum_sq_probs = torch.log(both(case, "sw", "sl").clamp(min=1e-300))
    inputs = {"input_ids": shifted(mask), "attention_mask": shifted(mask), "completion_mask": shifted(mask)}
    return made._compute_loss(Held(output), inputs, False)


def kto(case: Case) -> Output:
    """`label` is the case's, mismatched answers have the log-probabilities `y`, and `ref` is the reference of both."""
    data = Dataset.from_dict({"prompt": ["a", "b"] * 2, "completion": ["b", "c"] * 2, "label": [True, False] * 2})
    own = COMMON | dict(per_device_train_batch_size=2)
    made = KTOTrainer(model=saved_model(), args=KTOConfig(**own, **case.options), processing_class=tokenizer(),
                      train_dataset=data)
    ids = shifted(case.mask())
    out = lambda name: SimpleNamespace(log_probs=case.table(name), **unused(case.mask()))  # noqa: E731
    made.ref_model = Held(out("ref"), out("ref"))
    inputs = {"input_ids": ids, "attention_mask": ids, "completion_mask": ids, "KL_input_ids": ids,
              "KL_attention_mask": ids, "KL_completion_mask": ids, "label": case.seq("label").bool()}
    return made._compute_loss(Held(out("y"), out("x")), inputs, False)


def reward_model(case: Case) -> Output:
    model = Qwen2ForSequenceClassification(Qwen2Config(**(TINY.to_dict() | {"num_labels": 1})))
    made = RewardTrainer(model=model, args=RewardConfig(**COMMON, **case.options), processing_class=tokenizer(),
                         train_dataset=PAIRS)
    scores = torch.cat([case.seq("chosen"), case.seq("rejected")])[:, None]
    inputs = {"attention_mask": torch.ones(2 * case.rows, 1)}
    if "m" in case.levels:
        inputs["margin"] = case.seq("m")
    return made.compute_loss(Held(SimpleNamespace(logits=scores)), inputs)


def pairwise(cls: Any, config: Any, case: Case) -> Output:
    """CPO and ORPO: logits of both sides behind a prompt of one token, which is predicted by nothing."""
    made = cls(model=Qwen2ForCausalLM(TINY), args=config(**COMMON, max_length=16, **case.options),
               processing_class=tokenizer(), train_dataset=PAIRS)
    masks = {"chosen": case.mask(W), "rejected": case.mask(L)}
    batch = {}
    for side, mask in masks.items():
        ids = torch.cat([torch.zeros(len(mask), 1, dtype=torch.long), torch.zeros(mask.shape, dtype=torch.long)], 1)
        seen = torch.cat([torch.ones(len(mask), 1, dtype=torch.long), mask.long()], 1)
        batch |= {f"{side}_input_ids": ids, f"{side}_attention_mask": seen,
                  f"{side}_labels": torch.where(shifted(mask).bool(), ids, -100)}
    table = both(case, "chosen", "rejected")
    logits = logits_of(torch.cat([table, torch.full((len(table), 1), -1.0)], 1))
    return made.get_batch_loss_metrics(Held(SimpleNamespace(logits=logits)), batch)[0]


def cpo(case: Case) -> Output:
    return pairwise(CPOTrainer, CPOConfig, case)


def orpo(case: Case) -> Output:
    return pairwise(ORPOTrainer, ORPOConfig, case)


def tpo(case: Case) -> Output:
    """Each prompt's three responses are its chosen, rejected and gold answer, which the trainer has in three blocks."""
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "reference": "d"}
    made = TPOTrainer(model=saved_model(), args=TPOConfig(**COMMON, **case.options), processing_class=tokenizer(),
                      train_dataset=Dataset.from_list([row] * 4))
    order = torch.arange(case.rows).view(-1, 3).T.flatten()
    mask, table = shifted(case.mask())[order], case.table("x")[order]
    logits = logits_of(torch.cat([table, torch.full((len(table), 1), -1.0)], 1))
    inputs = {"input_ids": torch.zeros_like(mask), "attention_mask": mask, "completion_mask": mask}
    return made._compute_loss(Held(SimpleNamespace(logits=logits)), inputs, False)


def gkd(case: Case) -> Output:
    """The divergence of the trainer over the whole vocabulary: log-probabilities are logits, too."""
    labels = torch.where(case.mask(), WORD, -100)
    return GKDTrainer.generalized_jsd_loss(case.words("z"), case.words("d"), labels, **case.options)


def sdft(case: Case) -> Output:
    """The trainer's loss of the logits of student and teacher at the tokens of responses: its loss mask, as
    `_compute_teacher_student_logits` makes it, and what it divides by."""
    args = SDFTConfig(**COMMON, per_device_train_batch_size=4, num_generations=2, **case.options)
    rows = Dataset.from_dict({"prompt": ["a", "b"] * 24, "privileged_context": ["c", "d"] * 24})
    made = SDFTTrainer(model=saved_model(), args=args, train_dataset=rows, processing_class=tokenizer())
    ids, mask = torch.full(case.mask().shape, WORD), case.mask().long()
    logits = DistillationLogits(ids, mask * (torch.arange(mask.shape[1]) >= made.num_loss_tokens_to_skip).long(),
                                case.words("z"), case.words("d"))
    return made._compute_self_distillation_loss(made.model, {"old_per_token_logps": case.table("old")}, logits)


ORACLES: dict[str, Oracle] = {
    f.__name__: f for f in (grpo_loss, gmpo_loss, grpo_advantage, rloo_advantage, rloo_loss,
                            corrected_loss, sft, dpo, kto,
                            reward_model, cpo, orpo, tpo, gkd, sdft)}

if __name__ == "__main__":
    serve(ORACLES, ["trl", "transformers"])
