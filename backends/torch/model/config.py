"""The HuggingFace config that a model was compiled with.

In: a model of the plan. Out: its config object.
Errors: RL0726 there is none, RL0724 it is not the one that was compiled.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from rldsl.diag import fail
from rldsl.plan.model import Model


def config(model: Model) -> Any:
    file = Path(model.path) / "config.json"
    if not file.is_file():
        raise fail("RL0726", "no model directory here", place=model.path, label="config.json is missing",
                   help="it must be where it was at compilation, relative to the working directory")
    if sha256(file.read_bytes()).hexdigest() != model.config_digest:
        raise fail("RL0724", "the config of the model changed since compilation", place=str(file),
                   help="compile the program again")
    return AutoConfig.from_pretrained(model.path, trust_remote_code=False, local_files_only=True)
