"""TRL's GRPOTrainer at the work of `benchmarks/step.py`. Needs trl in the interpreter that runs it, and no rldsl.

    PYTHON -m benchmarks.step_trl WORK     # started by benchmarks/step.py --peer PYTHON

On several ranks each is such a process (`step_processes.py`), with its part of the rows of each update: data
parallelism by DDP over gloo. What one has sampled is added up over all; times are those of each rank's own steps.
"""

from __future__ import annotations

from typing import Any

from benchmarks.step_work import Clock, Times, Work, serve, share_of_digits


def rows_of_rank(work: Work) -> int:
    """Of each update. TRL cuts the rows of a batch in equal parts, also between samples of one prompt."""
    rows, parts = work.batch * work.n, work.updates * work.ranks
    if rows % parts:
        raise SystemExit(f"{rows} sequences cannot be divided into {parts} equal parts, one for each rank and update")
    return rows // parts


def grpo(work: Work) -> Times:
    """Padded batches, transformers' own generation, the settings that make it do the same work: no gradient
    checkpointing, one update a minibatch, a constant learning rate, no logging but the metrics that it always keeps;
    and what makes DDP fast here: every parameter has a gradient, and buffers are constant."""
    rows = rows_of_rank(work)
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    clock, tokens = Clock(), [0.0] * work.steps

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        tokens[min(len(clock.marks) - 1, work.steps - 1)] += sum(map(len, completion_ids))
        return [share_of_digits(c) for c in completions]

    class Mark(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.mark()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % work.updates == 0:
                clock.mark()

    asked = GRPOConfig(
        output_dir=f"{work.folder}/trl", use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
        logging_steps=10**6, max_steps=work.steps * work.updates, seed=work.seed, bf16=False,
        per_device_train_batch_size=rows, gradient_accumulation_steps=1,
        ddp_backend="gloo" if work.ranks > 1 else None, ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
        steps_per_generation=work.updates, num_generations=work.n, max_completion_length=work.tokens,
        temperature=1.0, beta=0.04 if work.ref else 0.0, loss_type="grpo", gradient_checkpointing=False,
        learning_rate=work.lr, lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0,
        optim="adamw_torch", shuffle_dataset=False)
    model = AutoModelForCausalLM.from_pretrained(work.base, dtype=torch.float32)
    trainer = GRPOTrainer(model=model, reward_funcs=reward, args=asked, callbacks=[Mark()],
                          train_dataset=Dataset.from_list(work.rows("prompts")),
                          processing_class=AutoTokenizer.from_pretrained(work.base))
    if trainer.accelerator.num_processes != work.ranks:
        raise RuntimeError(f"{trainer.accelerator.num_processes} ranks found one another, not {work.ranks}")
    trainer.train()
    return clock.times(trainer.accelerator.reduce(torch.tensor(tokens, dtype=torch.float64), "sum").tolist())


if __name__ == "__main__":
    serve({"grpo": grpo})
