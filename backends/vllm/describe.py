"""What the vllm backend can express, as the compiler and the verifier know it.

In: facts of a model, and a layout. Out: `DESCRIPTION`, and why a model cannot be sampled from. Nothing here imports
torch or vLLM.
"""

from __future__ import annotations

import json
from typing import Any

from rldsl.backends.vllm.costs import VllmMemory
from rldsl.plan.backends import Description, Facts
from rldsl.plan.model import Layout

PYTHON = "RLDSL_VLLM_PYTHON"  # environment variable: the Python that has vLLM, if it is not the one of the run
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# scalings whose factor vLLM multiplies the stated positions by; those of the others include it
SCALED = ("linear", "dynamic")
# numbers of a config that are above 0 where a layer has experts
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def problem(facts: Facts, layout: Layout) -> str:
    """The first feature that cannot be expressed, or ""."""
    config: dict[str, Any] = {key: json.loads(text) for key, text in facts.config}
    if any(config.get(name) for name in EXPERTS):
        return ("mixture-of-experts models are not supported: vLLM would choose other experts than training does, and "
                "its choices are not replayed")
    if facts.name not in FAMILIES:
        return f"the family {facts.name}; supported families: {', '.join(FAMILIES)}"
    return ""


def positions(facts: Facts) -> int:
    """The longest sequence that vLLM accepts (`_get_and_verify_max_len` of its config/model.py): the positions that the
    config states, times the factor of some scalings. 0: the config states none."""
    config: dict[str, Any] = {key: json.loads(text) for key, text in facts.config}
    rope = config.get("rope_parameters") or {}
    most = config.get("max_position_embeddings") or 0
    return int(most * (rope.get("factor") or 1)) if rope.get("rope_type") in SCALED else int(most)


DESCRIPTION = Description(
    calls=("generate",), divisions=("dp",), zero=0, per_step=False, other_logprobs=True, conversations=True,
    waiting=("keep", "recompute"),  # vLLM decides which blocks of its KV cache make room
    undivided="each rank that generates has its own engine, with all of the model",
    needs=("vllm", "pip install 'rldsl[vllm]'"), versions=("vllm", "0.32", "0.33"), interpreter=PYTHON,
    own_environment="python -m venv ~/vllm && ~/vllm/bin/pip install 'vllm==0.32.*' && "
                    f"export {PYTHON}=~/vllm/bin/python",
    positions=positions, problem=problem, memory=VllmMemory())
