"""An environment of verifiers: its own harness and its own tasks, in this machine's processes."""

import sums_with_tools  # noqa: F401  # imported before processes are forked
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

AGENT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}


def sums():
    return load_environment(resolve_env_config({"taskset": {"id": "sums_with_tools"}, "agent": AGENT}))
