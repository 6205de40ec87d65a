"""Loaded once where worlds are forked from: what each of their ranks would make anew.

transformers compiles its table of conversions, some thousand regular expressions, when a model is first described; the
hints of a plan's records are read when a plan is first decoded; configurations, tokenizers and decoding fill caches of
their own when they are first used. All of it takes a third of the CPU time of a short run. A rank imports the helper
that it runs, and with it the compiler; a command imports its own modules and reads the grammar: 30 to 60 ms of each.

What the imports made lives as long as the process: no collection of garbage in a rank has to go through it, and copy
its pages.
"""

import atexit
import gc
import importlib
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from rldsl import api
from rldsl.backends.torch.model import invariant_probe
from rldsl.plan.codec import decode, encode
from rldsl.plan.events import Sampling
from rldsl.runtime.backend import PackedBatch
from rldsl.runtime.metrics.run_record import versions
from rldsl.runtime.plan_file import PlanFile
from rldsl.verify import verify
from tests.backend_torch.shards import make_shard, plan_model
from tests.cpu import GARBAGE
from tests.gpu import shared_device
from tests.plan.sample import grpo
from tests.tiny import make_model, write_jsonl

PROGRAM = """
use std.grpo (group_norm, grpo)
data prompts = jsonl("rows.jsonl", batch=2, max_prompt_tokens=4)
model actor = causal_lm("model") train adamw(lr=1e-3)
flow warm(steps=1) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=2, max_new_tokens=2)
  actor.train(gen, loss=grpo(old=gen.logprobs, adv=group_norm(0.1 * len(gen)), ref=gen.logprobs))
}
"""
COMMANDS = ("rldsl.cli.run", "rldsl.commands.run", "rldsl.commands.check", "rldsl.commands.compile", "rldsl.run",
            "rldsl.runtime.launch")

for module in (*COMMANDS, "tests.responses", "tests.checkpoint.runs", "tests.end_to_end.programs"):
    importlib.import_module(module)
get_checkpoint_conversion_mapping("llama")
versions()
verify(decode(encode(grpo()), "sample.plan"))


def _warm(folder: Path) -> None:
    """Compile a program, build its model, sample, take log-probs, update and save, as ranks and commands do. Autograd
    would survive no fork after a backward pass."""
    model = make_model(folder / "model", num_hidden_layers=1)
    write_jsonl(folder / "rows.jsonl", [{"prompt": "1+1="}])
    (folder / "warm.rlf").write_text(PROGRAM)
    with chdir(folder):
        PlanFile.from_bytes(encode(api.compile("warm.rlf")), "warm.plan")
    shard = make_shard(plan_model(str(model)), 0)
    one = PackedBatch(*(torch.tensor([x]) for x in (0, 2, 0)), torch.tensor([2, 3]))
    made = shard.generate(one, Sampling(max_new_tokens=3), seed=0, step=0, max_num_seqs=0)
    shard.infer([made.batch], "logprobs", 1.0)
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.AdamW([weight]).step()
    torch.save([weight.grad], folder / "saved")
    torch.load(folder / "saved")


def _shared(probe: Callable[..., object], folder: Path) -> Callable[..., object]:
    """A probe of the processor's kernels whose answer all ranks forked from here share: it is the same in each. `folder`
    holds answers that are "" (good), by the arguments; another is found again by each rank."""
    def answer(*args: object) -> object:
        good = folder / f"{probe.__name__}{args}".replace("/", "_")
        if good.exists():
            return ""
        if not (found := probe(*args)):
            good.touch()
        return found

    return cache(answer)


answers = Path(tempfile.mkdtemp(prefix="rldsl-probes-"))
atexit.register(shutil.rmtree, answers, ignore_errors=True)  # of the server: what is forked ends without
for name in ("_product_varies", "_gradient_varies", "_attention_varies", "_attention_gradient_varies", "_sum_varies"):
    setattr(invariant_probe, name, _shared(getattr(invariant_probe, name), answers))
if shared_device.device() is None:  # a process in which CUDA has begun, be it to see whether it is there, cannot be forked
    with TemporaryDirectory() as made:
        _warm(Path(made))
gc.collect()
gc.freeze()
gc.set_threshold(*GARBAGE)
gc.enable()
