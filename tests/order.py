"""The order of test files: `pytest --dist loadfile --no-loadscope-reorder` hands them out as they come, and one that
takes long must not come last, when the other workers have nothing left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

EACH = 0.1  # seconds of a test, about
SECONDS = {  # of files whose tests take longer than that: about, on two busy processors (`pytest --durations`)
    "end_to_end/test_random_placements.py": 90, "end_to_end/test_invariance.py": 60, "postmortem/test_worlds.py": 70,
    "checkpoint/test_demo_killed.py": 55, "checkpoint/test_faults.py": 45, "checkpoint/test_resume.py": 30,
    "cluster/test_two_hosts.py": 50, "docs/test_tutorial.py": 40, "verify/test_mutants.py": 35,
    "selection/test_selection.py": 35, "realloc/test_matrix.py": 25, "realloc/test_values.py": 25,
    "zero/test_programs.py": 25, "plan_views/test_emitted_runs.py": 25, "memory/test_measured.py": 25,
    "lora/test_run.py": 25, "lora/test_train.py": 15, "rewards/test_programs.py": 20, "rewards/test_pool.py": 20,
    "postmortem/test_neighbour.py": 20, "postmortem/test_launch.py": 20, "evaluation/test_runs.py": 25,
    "library/test_examples.py": 15, "library/test_policy_gradient.py": 30, "starters/test_starters.py": 25,
    "backend_torch/test_forward.py": 20,
    "generation/test_layouts.py": 15, "generation/test_split_kv.py": 10, "relabelled/test_run.py": 20,
    "moe/test_steps.py": 15, "moe/test_programs.py": 15, "notebook/test_kernel.py": 10, "runtime/test_failure.py": 15,
    "data/test_bad_files.py": 10, "data/test_memory.py": 10, "lsp/test_forecast.py": 15, "lsp/test_server.py": 15,
    "memory/test_recompute.py": 10, "search/test_modes.py": 15, "simulate/test_profile.py": 10,
    "megatron/test_families.py": 15, "megatron/test_kernels.py": 35, "megatron/test_program.py": 10,
    "consistency/test_invariant.py": 10, "context/test_programs.py": 15, "interleaved/test_programs.py": 15, "format/test_format.py": 10,
    "end_to_end/test_repeat.py": 15, "end_to_end/test_blocks.py": 15, "end_to_end/test_reference.py": 15,
    "checkpoint/test_positions.py": 15, "docs/test_site.py": 10,
}


def longest_first(nodeids: Sequence[str]) -> list[int]:
    """The positions of tests, those of the longest file first; inside a file as they are."""
    files = [nodeid.partition("::")[0].removeprefix("tests/") for nodeid in nodeids]
    seconds = {name: max(SECONDS.get(name, 0), EACH * count) for name, count in Counter(files).items()}
    return sorted(range(len(files)), key=lambda i: -seconds[files[i]])
