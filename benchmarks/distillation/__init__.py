"""Distillation of distributions against supervised fine-tuning on the same tokens: see `__main__`."""
