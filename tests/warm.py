"""Loaded once where worlds are forked from: what each of their ranks would make anew.

transformers compiles its table of conversions, some thousand regular expressions, when a model is first described; the
hints of a plan's records are read when a plan is first decoded; configurations, tokenizers and decoding fill caches of
their own when they are first used. All of it takes a third of the CPU time of a short run.

What the imports made lives as long as the process: no collection of garbage in a rank has to go through it, and copy
its pages.
"""

import gc
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from rldsl.plan.codec import decode, encode
from rldsl.plan.events import Sampling
from rldsl.runtime.backend import PackedBatch
from rldsl.runtime.metrics.run_record import versions
from rldsl.verify import verify
from tests.backend_torch.shards import make_shard, plan_model
from tests.cpu import GARBAGE
from tests.plan.sample import grpo
from tests.tiny import make_model

get_checkpoint_conversion_mapping("llama")
versions()
verify(decode(encode(grpo()), "sample.plan"))


def _infer() -> None:
    """Build a model, sample and take log-probs, as ranks do. Autograd would survive no fork after a backward pass."""
    with TemporaryDirectory() as folder:
        shard = make_shard(plan_model(str(make_model(Path(folder) / "model", num_hidden_layers=1))), 0)
        one = PackedBatch(*(torch.tensor([x]) for x in (0, 2, 0)), torch.tensor([2, 3]))
        made = shard.generate(one, Sampling(max_new_tokens=3), seed=0, step=0, max_num_seqs=0)
        shard.infer([made.batch], "logprobs", 1.0)


_infer()
gc.collect()
gc.freeze()
gc.set_threshold(*GARBAGE)
