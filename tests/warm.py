"""Loaded once where worlds are forked from: what each of their ranks would make anew.

transformers compiles its table of conversions, some thousand regular expressions, when a model is first described.
"""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")
