"""Loaded once where worlds are forked from: what each of their ranks would make anew.

transformers compiles its table of conversions, some thousand regular expressions, when a model is first described. What
the imports made lives as long as the process: no collection of garbage in a rank has to go through it, and copy its
pages.
"""

import gc

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")
gc.collect()
gc.freeze()
