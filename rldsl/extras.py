"""Which extra of `pip install 'rldsl[EXTRA]'` brings a package that is not installed.

In: the error of an import. Out: a diagnostic, or None where the module is no package of ours. A test compares the
table with pyproject.toml.
"""

from __future__ import annotations

from rldsl.diag import Diagnostic

# the name under which a package is imported -> the smallest extra with it
EXTRA_OF = {
    "torch": "compile", "transformers": "compile", "safetensors": "compile",
    "huggingface_hub": "compile", "numpy": "compile", "rich": "run",
    "pyarrow": "parquet", "PIL": "images", "datasets": "datasets", "matplotlib": "plot",
    "pandas": "notebook", "IPython": "notebook",
    "tensorboard": "tensorboard", "wandb": "wandb", "accelerate": "trackers", "math_verify": "math",
    "megatron": "megatron", "flash_attn": "flash", "openenv": "openenv",
    "verifiers": "verifiers", "vllm": "vllm",
}
# import name -> the package's name for pip, where they differ
DISTRIBUTION_OF = {"IPython": "ipython", "megatron": "megatron-core", "flash_attn": "flash-attn",
                   "huggingface_hub": "huggingface-hub", "math_verify": "math-verify", "openenv": "openenv-core",
                   "PIL": "pillow"}


def missing_package(error: ModuleNotFoundError, place: str = "") -> Diagnostic | None:
    """RL0097 for a package that an extra brings. place: what needs it, such as "rlc compile"."""
    package = (error.name or "").partition(".")[0]
    extra = EXTRA_OF.get(package)
    if extra is None:
        return None
    return Diagnostic("RL0097", f"{package} is not installed", place=place,
                      help=f"run `pip install 'rldsl[{extra}]'`; `rldsl[all]` brings everything")
