"""A third backend, as docs/backends.md says how to write one: transformers' own module, whole on every rank, one
sequence after another, with torch's AdamW. Slow, and plain enough to be believed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rldsl.plan.model import Layout, Mesh, Model

if TYPE_CHECKING:
    import torch

    from rldsl.runtime.backend import Axes, LossFn, MicroBatch, PackedBatch, WeightCache, WeightDigest

MOMENTS = ("exp_avg", "exp_avg_sq")


def build(model: Model, layout: Layout, mesh: Mesh, axes: Axes, device: torch.device, *, load: bool, trainable: bool,
          weight_cache: WeightCache | None = None) -> Plain:
    return Plain(model, axes, device, trainable)


class Plain:
    """One rank's whole copy of a model."""

    def __init__(self, model: Model, axes: Axes, device: torch.device, trainable: bool):
        import torch
        from transformers import AutoModelForCausalLM

        self.model, self.axes, self.done = model, axes, 0
        self.net = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32).eval().to(device)
        self.named = dict(self.net.named_parameters())
        if trainable:
            o = model.optimizer
            assert o is not None
            self.adam = torch.optim.AdamW(self.named.values(), lr=o.lr, betas=o.betas, eps=o.eps,
                                          weight_decay=o.weight_decay)

    def weight_digests(self) -> Sequence[WeightDigest]:
        return ()  # transformers reads the files

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        return {name: p.data for name, p in self.named.items()}

    def outputs(self, batch: PackedBatch, temperature: float) -> dict[str, torch.Tensor]:
        """Log-probs and entropy of response tokens."""
        import torch

        made: dict[str, list[torch.Tensor]] = {"logprobs": [], "entropy": []}
        lens = (batch.prompt_lens + batch.response_lens).tolist()
        for tokens, prompt in zip(batch.tokens.split(lens), batch.prompt_lens.tolist()):
            every = (self.net(tokens[None]).logits[0, prompt - 1 : -1] / temperature).log_softmax(-1)
            made["logprobs"].append(every.gather(1, tokens[prompt:, None])[:, 0])
            made["entropy"].append(-(every.exp() * every).sum(-1))
        return {what: torch.cat(found) if found else torch.empty(0) for what, found in made.items()}

    def infer(self, batches: Sequence[PackedBatch], output: str, temperature: float) -> torch.Tensor:
        import torch

        with torch.no_grad():
            return torch.cat([self.outputs(b, temperature)[output] for b in batches] or [torch.empty(0)])

    def train(self, minibatch: Sequence[MicroBatch], outputs: Sequence[Sequence[str]], temperature: float,
              loss_fn: LossFn, should_stop: Callable[[], bool] | None = None, recompute: str = "none",
              rate: float | None = None) -> Mapping[str, float] | None:
        import torch
        import torch.distributed as dist

        self.adam.zero_grad()
        for i, frames in enumerate(minibatch):
            fresh = [self.outputs(frame, temperature) for frame in frames]
            loss_fn(i, [{name: f[name] for name in names} for f, names in zip(fresh, outputs)]).backward()
        if should_stop is not None and should_stop():
            return None
        for p in self.named.values():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            if self.axes.dp.size > 1:
                dist.all_reduce(p.grad, group=self.axes.dp.group)
        limit = self.model.optimizer.clip_grad
        norm = float(torch.nn.utils.clip_grad_norm_(self.named.values(), limit or float("inf")))
        if norm == norm and norm != float("inf"):
            scheduled = self.skip_updates(1)
            self.adam.param_groups[0]["lr"] = rate = scheduled if rate is None else rate
            self.adam.step()
        return {"grad_norm": norm, "lr": rate if norm == norm else 0.0}

    def skip_updates(self, updates: int) -> float:
        from rldsl.backends.torch.train.optimizer import learning_rate

        self.done += updates
        return learning_rate(self.model.optimizer, self.done - 1, self.model.planned_updates)

    def optimizer_state(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        return {kind: {n: self.adam.state[p][kind] for n, p in self.named.items()} for kind in MOMENTS}

    def schedule_state(self) -> Mapping[str, int]:
        return {"done": self.done}

    def load_schedule_state(self, counts: Mapping[str, int]) -> None:
        self.done = counts["done"]

    def export(self) -> Mapping[str, Any]:
        return {"config": self.net.config, "tokenizer": self.model.path}

    def offload(self, part: str) -> None:
        """Parameters stay where they are."""

    def onload(self, part: str) -> Callable[[], None]:
        return lambda: None

    def alias(self, other: Plain) -> None:
        for name, p in self.named.items():
            p.data = other.named[name].data

    def free(self) -> None:
        for p in self.named.values():
            p.data = p.data.new_empty(()).expand(p.shape)  # one element, and the shape

    def allocate(self) -> None:
        for p in self.named.values():
            p.data = p.data.new_empty(p.shape)
