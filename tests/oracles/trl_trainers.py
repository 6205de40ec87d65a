"""What the servers of the two TRL versions share: a tiny random model with its tokenizer, and policy trainers made by
their own constructors, whose log-probabilities are replaced by those of a case."""

from __future__ import annotations

import os
import tempfile
from typing import Any

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM  # noqa: E402

from wire import Case  # noqa: E402

_FOLDER = tempfile.TemporaryDirectory()
FOLDER = _FOLDER.name
TINY = Qwen2Config(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
                   num_key_value_heads=1, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None)
COMMON = dict(output_dir=FOLDER, use_cpu=True, bf16=False, report_to="none", save_strategy="no",
              gradient_checkpointing=False)
WORD = 3  # the token that every response consists of


def tokenizer() -> PreTrainedTokenizerFast:
    words = {w: i for i, w in enumerate(("<pad>", "<eos>", "<unk>", "a", "b", "c", "d", "e"))}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def saved_model() -> str:
    """The tiny model on disk: some trainers load the reference from there."""
    folder = os.path.join(FOLDER, "tiny")
    if not os.path.isdir(folder):
        Qwen2ForCausalLM(TINY).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    return folder


def policy_trainer(cls: Any, config: Any, case: Case) -> Any:
    """A GRPO or RLOO trainer for the batch of the case, with one step for each generation. The option `vllm` makes it
    correct for a sampler's log-probabilities; the constructor would start vLLM for that."""
    own = dict(case.options)
    vllm = own.pop("vllm", False)
    rewards = [lambda completions, **k: [0.0] * len(completions)] * (2 if "r2" in case.levels else 1)
    size = case.n if case.n > 1 else case.rows  # the configuration asks for two or more
    args = config(**COMMON, per_device_train_batch_size=case.rows, num_generations=size, steps_per_generation=1,
                  gradient_accumulation_steps=1, **own)
    prompts = Dataset.from_dict({"prompt": ["a", "b"] * 24})
    made = cls(model=saved_model(), reward_funcs=rewards, args=args, train_dataset=prompts,
               processing_class=tokenizer())
    made.num_generations = case.n
    made.use_vllm = vllm
    made.current_gradient_accumulation_steps = 1
    made.model.train()
    return made


def loss_of(made: Any, case: Case, **inputs: Tensor) -> Tensor:
    """The trainer's loss, with the fresh log-probabilities as the model's."""
    table, mask = case.table("x"), case.mask().long()
    ones = torch.ones(case.rows, 1, dtype=torch.long)
    entropies = case.table("h") if "h" in case.levels else torch.zeros_like(table)
    made._get_per_token_logps_and_entropies = lambda *a, **k: (table, entropies, None)
    known = dict(prompt_ids=ones, prompt_mask=ones, completion_ids=WORD * mask, completion_mask=mask,
                 num_items_in_batch=mask.sum())
    return made._compute_loss(made.model, known | inputs)
