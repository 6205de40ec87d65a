"""A training step asks the device for nothing between its micro-batches: what stops a GPU is counted, on a processor.

Reading a number of a tensor (`item`, `int`), or an operation whose result has a size that only the numbers tell, makes
the host wait for all that was issued before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rldsl.plan.model import Optimizer
from rldsl.runtime.interpreter.minibatch_loss import MinibatchLoss, loss_counts
from rldsl.runtime.interpreter.ragged_index import FrameRows
from tests.backend_torch.shards import make_shard, pack, plan_model, ragged
from tests.end_to_end.programs import compile_program
from tests.library.harness import Batch, compile_loss
from tests.tiny import make_all, make_model
from tests.world import run_world

ASKS = ("_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "masked_select", "is_nonzero", "equal")
ROWS = ragged(24, 46, longest=9)


class Asked(TorchDispatchMode):
    """Operations that wait for a device, by name. A boolean index is a `nonzero`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1]):
            name = "nonzero"
        if name in ASKS or name == "repeat_interleave" and not (kwargs or {}).get("output_size"):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def passes_recorded() -> Iterator[list[dict[str, int]]]:
    """What each run of a minibatch's passes asks for, in a list that grows."""
    from rldsl.backends.torch import shard as module

    plain, found = module.pipeline_forward_backward, []

    def counted(*args: Any) -> None:
        with Asked() as asked:
            plain(*args)
        found.append(dict(asked.found))

    with mock.patch.object(module, "pipeline_forward_backward", counted):
        yield found


def _trained(rank: int, path: str, parts: int) -> list[dict[str, int]]:
    """What is asked from the first forward pass to the optimizer's step, of one micro-batch and of several."""
    shard = make_shard(plan_model(path, optimizer=Optimizer(lr=1e-3)), rank)
    with passes_recorded() as found:
        for count in (1, parts):
            batches = [(pack(ROWS[i::count]),) for i in range(count)]
            shard.train(batches, [["logprobs"]], 1.0, lambda i, fresh: fresh[0]["logprobs"].sum())
    return found


def test_passes_of_a_model_ask_for_nothing(tmp_path) -> None:
    (found,) = run_world(1, _trained, str(make_model(tmp_path / "m")), 4)
    assert found == [{}, {}]


def waits(module: str, call: str, make: Callable[[Batch], dict[str, Any]], known: bool) -> Counter[str]:
    """Of a loss on a micro-batch. known: whether its tokens were counted before."""
    b = Batch.random(seed=1, prompts=6, n=4, max_len=9)
    code, inputs = compile_loss(module, call, b, "causal_lm", "", make(b))
    run = MinibatchLoss(code, loss_counts(code, b.frames, range(b.rows), b.lens))
    rows = torch.arange(b.rows)
    lens = {f: torch.tensor(x) for f, x in b.lens.items()}
    views = {f: FrameRows(rows, rows // b.n, x, sum(b.lens[f]) if known else None) for f, x in lens.items()}
    given = {n: (torch.tensor(x, dtype=torch.float64) if isinstance(x, float) else x.data) for n, x in inputs.items()}
    fresh = b.logprobs(3).data.clone().requires_grad_()
    with Asked() as asked:
        run({n: given.get(n, fresh) for n in code.inputs()}, views).backward()
    return asked.found


LOSSES = [("std.grpo", "grpo(old=old, adv=adv, ref=ref)",
           lambda b: dict(old=b.logprobs(4), adv=b.seqs(5), ref=b.logprobs(6))),
          ("std.ppo", "ppo_clip(old=old, adv=adv)", lambda b: dict(old=b.logprobs(4), adv=b.logprobs(5))),
          ("std.sft", "sft()", lambda b: {})]


@pytest.mark.parametrize("module, call, make", LOSSES)
def test_losses_ask_for_nothing(module: str, call: str, make: Callable[[Batch], dict[str, Any]]) -> None:
    assert not waits(module, call, make, True)


def test_what_asks_is_seen() -> None:
    """Without the count of tokens the number of elements must be asked for."""
    assert waits(*LOSSES[0], False)
    with Asked() as asked:
        x = torch.arange(4)
        x[x > 1].sum().item()
    assert asked.found == {"nonzero": 1, "_local_scalar_dense": 1}


def _whole_event(rank: int, data: bytes, folder: str, cwd: str) -> list[dict[str, int]]:
    """What is asked between the first forward pass of a minibatch and the last backward pass, in a run."""
    from tests.end_to_end.programs import _rank

    with passes_recorded() as found:
        _rank(rank, data, f"{folder}/run/out", cwd, None, Path(folder) / "responses")
    return found


PROGRAM = """
use std.ppo (gae, ppo_clip, value_clip, kl_rewards)

cluster nodes=1 gpus=1
data prompts = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=16)
model actor = causal_lm("models/sft") train adamw(lr=1e-3)
model critic = value_model("models/sft") train adamw(lr=1e-3)

flow ppo(steps=1, seed=1) {
  prompt = prompts.next()
  gen = actor.generate(prompt, n=2, max_new_tokens=8)
  v = critic.values(gen)
  r = kl_rewards(len(gen) / 8.0, gen.logprobs, gen.logprobs, coef=0.1)
  adv, ret = gae(r, v, gamma=1.0, lam=0.95)
  critic.train(gen, loss=value_clip(old=v, ret=ret), minibatches=2) on mesh(0:1) mbs=2
  actor.train(gen, loss=ppo_clip(old=gen.logprobs, adv=whiten(adv)), minibatches=2) on mesh(0:1) mbs=2
}
"""


def test_a_whole_train_event_asks_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data inputs of the loss are selected before the passes: advantages, old log-probs, values of the critic."""
    monkeypatch.chdir(make_all(tmp_path / "tiny"))
    (tmp_path / "p.rlf").write_text(PROGRAM)
    data = compile_program(tmp_path / "p.rlf", {}, None, tmp_path)
    (found,) = run_world(1, _whole_event, data, str(tmp_path), str(Path.cwd()))
    assert len(found) == 4 and found == [{}] * 4
