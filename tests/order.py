"""The order of test files: `pytest --dist loadfile --no-loadscope-reorder` hands them out as they come, and one that
takes long must not come last, when the other workers have nothing left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

EACH = 0.1  # seconds of a test, about
SECONDS = {  # of files whose tests take longer than that: about, on two busy processors (`pytest --cpu`, and waits)
    "end_to_end/test_random_placements.py": 75, "postmortem/test_worlds.py": 70, "checkpoint/test_demo_killed.py": 50,
    "cluster/test_two_hosts.py": 50, "end_to_end/test_invariance.py": 45, "verify/test_mutants.py": 40,
    "memory/test_measured.py": 35, "docs/test_tutorial.py": 30, "plan_views/test_emitted_runs.py": 30,
    "selection/test_selection.py": 30, "checkpoint/test_faults.py": 30, "zero/test_programs.py": 30,
    "realloc/test_matrix.py": 25, "moe/test_programs.py": 25, "generation/test_layouts.py": 25,
    "backend_torch/test_forward.py": 25, "relabelled/test_run.py": 20, "checkpoint/test_resume.py": 20,
    "postmortem/test_neighbour.py": 20, "megatron/test_kernels.py": 20, "lora/test_run.py": 20,
    "starters/test_starters.py": 20, "evaluation/test_runs.py": 15, "rewards/test_pool.py": 15,
    "rewards/test_programs.py": 15, "postmortem/test_launch.py": 15, "consistency/test_invariant.py": 15,
    "megatron/test_families.py": 15, "megatron/test_program.py": 15, "context/test_programs.py": 15,
    "interleaved/test_programs.py": 15, "moe/test_steps.py": 15, "memory/test_fit.py": 15, "sync/test_sync.py": 15,
    "lsp/test_forecast.py": 15, "lsp/test_server.py": 15, "zero/test_steps.py": 15, "fuzz/test_fuzz.py": 15,
    "search/test_exhaustive.py": 15, "search/test_modes.py": 15, "simulate/test_profile.py": 15,
    "library/test_policy_gradient.py": 10, "library/test_examples.py": 10, "realloc/test_values.py": 10,
    "lora/test_train.py": 10, "verify/test_issue.py": 10, "verify/test_lanes.py": 10, "offload/test_run.py": 10,
    "backend_torch/test_train.py": 10, "backend_torch/test_budget.py": 10, "backend_torch/test_half.py": 10,
    "generation/test_split_kv.py": 10, "generation/test_reference.py": 10, "moe/test_forward.py": 10,
    "notebook/test_kernel.py": 10, "runtime/test_failure.py": 10, "data/test_bad_files.py": 10,
    "data/test_memory.py": 10, "memory/test_recompute.py": 10, "end_to_end/test_blocks.py": 10,
    "end_to_end/test_reference.py": 10, "checkpoint/test_positions.py": 10, "docs/test_site.py": 10,
    "plan/test_classes.py": 10, "context/test_shards.py": 10, "megatron/test_train.py": 10,
}


def longest_first(nodeids: Sequence[str]) -> list[int]:
    """The positions of tests, those of the longest file first; inside a file as they are."""
    files = [nodeid.partition("::")[0].removeprefix("tests/") for nodeid in nodeids]
    seconds = {name: max(SECONDS.get(name, 0), EACH * count) for name, count in Counter(files).items()}
    return sorted(range(len(files)), key=lambda i: -seconds[files[i]])
