"""Plain torch loops at the work of `benchmarks/step.py`: HuggingFace modules, padded batches, full logits.

    python -m benchmarks.step_plain WORK     # started by benchmarks/step.py

What a careful person writes by hand: everything batched, nothing computed twice, no library of RL beside.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from benchmarks.step_work import Clock, Times, Work, serve


def update(model: torch.nn.Module, adam: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    adam.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    adam.step()


def inputs(mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of a batch padded on the left, [B, T]."""
    return dict(attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))


def logprobs(model: torch.nn.Module, tokens: torch.Tensor, mask: torch.Tensor, size: int) -> torch.Tensor:
    """[B, size]: of the last `size` tokens."""
    logits = model(tokens, **inputs(mask), logits_to_keep=size + 1).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, tokens[:, -size:, None])[..., 0]


def values(model: torch.nn.Module, tokens: torch.Tensor, mask: torch.Tensor, size: int) -> torch.Tensor:
    """[B, size]: of the states in which the last `size` tokens were chosen."""
    return model(tokens, **inputs(mask)).logits[:, -size - 1 : -1, 0]


def mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (x * mask).sum() / mask.sum()


def gae(rewards: torch.Tensor, old: torch.Tensor, mask: torch.Tensor, lam: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns, [B, L], with gamma 1; nothing counts behind the end of a response."""
    following = torch.cat([old[:, 1:] * mask[:, 1:], torch.zeros_like(old[:, :1])], 1)
    delta, running = (rewards + following - old) * mask, torch.zeros(len(old))
    advantages = torch.empty_like(old)
    for t in reversed(range(old.shape[1])):
        running = advantages[:, t] = delta[:, t] + lam * running
    return advantages, (advantages + old) * mask


def ppo(work: Work) -> Times:
    torch.set_num_threads(1)
    torch.manual_seed(work.seed)
    tokenizer = AutoTokenizer.from_pretrained(work.base, padding_side="left")
    actor, ref = (AutoModelForCausalLM.from_pretrained(work.base, dtype=torch.float32) for _ in range(2))
    critic = AutoModelForTokenClassification.from_pretrained(work.base, num_labels=1, dtype=torch.float32)
    judge = AutoModelForSequenceClassification.from_pretrained(work.rm, dtype=torch.float32)
    for model in (actor, ref, critic, judge):
        model.eval()
    adams = [torch.optim.AdamW(m.parameters(), lr=work.lr, weight_decay=0.0) for m in (actor, critic)]
    rows, clock, made = work.rows("prompts"), Clock(), []
    clock.mark()
    for step in range(work.steps):
        texts = [rows[(step * work.batch + i) % len(rows)]["prompt"] for i in range(work.batch) for _ in range(work.n)]
        made.append(_ppo_step(work, tokenizer, actor, ref, critic, judge, adams, texts))
        clock.mark()
    return clock.times(made)


def _ppo_step(work: Work, tokenizer: Any, actor: Any, ref: Any, critic: Any, judge: Any,
              adams: list[torch.optim.Optimizer], texts: list[str]) -> float:
    """Number of sampled tokens."""
    given = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
    with torch.no_grad():
        tokens = actor.generate(**given, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                                max_new_tokens=work.tokens)
        size = tokens.shape[1] - given["input_ids"].shape[1]
        sampled = tokens[:, -size:]
        ends = (sampled == tokenizer.eos_token_id).int()
        mask = (ends.cumsum(1) - ends == 0).float()  # of responses, with their end
        whole = torch.cat([given["attention_mask"], mask.long()], 1)
        old, against = logprobs(actor, tokens, whole, size), logprobs(ref, tokens, whole, size)
        before, score = values(critic, tokens, whole, size), _scores(judge, tokens, whole)
        rewards = -0.1 * (old - against) * mask
        rewards[torch.arange(len(tokens)), mask.sum(1).long() - 1] += score
        advantages, returns = gae(rewards, before, mask, 0.95)
        center = mean(advantages, mask)
        spread = (((advantages - center) ** 2 * mask).sum() / (mask.sum() - 1) + 1e-8).sqrt()
        advantages = (advantages - center) / spread
    for part in torch.randperm(len(tokens)).chunk(work.updates):
        t, w, m = tokens[part], whole[part], mask[part]
        now = values(critic, t, w, size)
        near = torch.clamp(now, before[part] - 0.2, before[part] + 0.2)
        update(critic, adams[1], 0.5 * mean(torch.max((now - returns[part]) ** 2, (near - returns[part]) ** 2), m))
    for part in torch.randperm(len(tokens)).chunk(work.updates):
        t, w, m, a = tokens[part], whole[part], mask[part], advantages[part]
        ratio = (logprobs(actor, t, w, size) - old[part]).exp()
        update(actor, adams[0], mean(torch.max(-a * ratio, -a * ratio.clamp(0.8, 1.2)), m))
    return float(mask.sum())


def _scores(judge: Any, tokens: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """[B]: at the last token of each sequence."""
    hidden = judge.model(tokens, **inputs(whole)).last_hidden_state
    last = whole.shape[1] - 1 - whole.flip(1).argmax(1)
    return judge.score(hidden[torch.arange(len(tokens)), last])[:, 0]


def sft(work: Work) -> Times:
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(work.base)
    model = AutoModelForCausalLM.from_pretrained(work.base, dtype=torch.float32).eval()
    adam = torch.optim.AdamW(model.parameters(), lr=work.lr, weight_decay=0.0)
    rows, clock, made = work.rows("answers"), Clock(), []
    clock.mark()
    for step in range(work.steps):
        some = [rows[(step * work.batch + i) % len(rows)] for i in range(work.batch)]
        made.append(0.0)
        for part in (some[i :: work.updates] for i in range(work.updates)):
            pairs = [(tokenizer(r["prompt"])["input_ids"], tokenizer(r["answer"])["input_ids"] +
                      [tokenizer.eos_token_id]) for r in part]
            longest = max(len(p) + len(a) for p, a in pairs)
            tokens = torch.tensor([p + a + [0] * (longest - len(p) - len(a)) for p, a in pairs])
            wanted = torch.tensor([[-100] * len(p) + a + [-100] * (longest - len(p) - len(a)) for p, a in pairs])
            mask = (torch.arange(longest) < torch.tensor([[len(p) + len(a)] for p, a in pairs])).long()
            logits = model(tokens, attention_mask=mask).logits[:, :-1]
            update(model, adam, F.cross_entropy(logits.flatten(0, 1), wanted[:, 1:].flatten(), ignore_index=-100))
            made[-1] += float(sum(len(a) for _, a in pairs))
        clock.mark()
    return clock.times(made)


if __name__ == "__main__":
    serve({"ppo": ppo, "sft": sft})
