"""Numbers that are added by index: on a GPU in any order, so that each place has a reason why that changes nothing."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
ADD = {f"{name}{end}" for name in ("index_add", "scatter_add", "index_put", "scatter_reduce", "index_reduce")
       for end in ("", "_")}
EXACT, ONCE, STATED, WRITES, CPU = (
    "integers, or their sums in float64, or largest numbers: exact in any order",
    "of equal indices all but one add 0",
    "float64 or float32 rounding that --deterministic removes, as docs/howto/resume.md says",
    "adds nothing: each place is written once",
    "tables that only CPUs keep, where torch adds in the order of the indices")
REASONS = {
    ("rldsl/runtime/interpreter/derive.py", "_pick"): EXACT,
    ("rldsl/runtime/interpreter/exact_sums.py", "exact_words"): EXACT,
    ("rldsl/runtime/interpreter/expression_ops.py", "reduce"): STATED,
    ("rldsl/runtime/interpreter/expression_ops.py", "_across"): STATED,
    ("backends/megatron/experts.py", "_run"): STATED,
    ("backends/torch/kernels/embeddings.py", "backward"): CPU,
    ("backends/torch/model/experts.py", "_bincount"): EXACT,
    ("backends/torch/model/invariant_probe.py", "_decodes_alike"): WRITES,
    ("backends/torch/model/logprobs.py", "_grad_logits"): ONCE,
    ("backends/torch/model/logprobs.py", "_grad_of_weights"): ONCE,
    ("backends/torch/model/logprobs.py", "_add_to_held"): CPU,
    ("backends/torch/model/vision.py", "shifts"): EXACT,
    ("backends/torch/train/router_bias.py", "_count"): EXACT,
    ("backends/torch/train/quantized_adamw.py", "_add_maxima"): EXACT,
    ("backends/torch/generate/generate.py", "shares_prompt"): EXACT,
    ("backends/torch/generate/kv_cache.py", "put"): WRITES,
}


def places() -> set[tuple[str, str]]:
    """(file, innermost function) of every call."""
    found = set()
    for package in ("rldsl/runtime", "backends"):
        for path in (ROOT / package).rglob("*.py"):
            inside: dict[ast.AST, str] = {}
            tree = ast.parse(path.read_text())
            for node in ast.walk(tree):  # outer functions first
                if isinstance(node, ast.FunctionDef):
                    inside |= dict.fromkeys(ast.walk(node), node.name)
            found |= {(str(path.relative_to(ROOT)), inside.get(node, "")) for node in ast.walk(tree)
                      if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ADD
                      and len(node.args) >= 2}
    return found


def test_every_place_has_a_reason() -> None:
    assert places() == REASONS.keys()
