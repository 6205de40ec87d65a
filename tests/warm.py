"""Loaded once where worlds are forked from: what each of their ranks would make anew.

transformers compiles its table of conversions, some thousand regular expressions, when a model is first described; the
hints of a plan's records are read when a plan is first decoded. What the imports made lives as long as the process: no
collection of garbage in a rank has to go through it, and copy its pages.
"""

import gc

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from rldsl.plan.codec import decode, encode
from rldsl.verify import verify
from tests.plan.sample import grpo

get_checkpoint_conversion_mapping("llama")
verify(decode(encode(grpo()), "sample.plan"))
gc.collect()
gc.freeze()
