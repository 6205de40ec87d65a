"""`rlc doctor`: what is installed on this machine, which devices it has, and what is missing for what.

In: nothing. Out: an `Installation`. torch is imported in a separate process: a build that crashes, or that waits for
a driver, is a finding and does not end the command.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from rldsl.extras import DISTRIBUTION_OF, EXTRA_OF
from rldsl.files import cache_folder
from rldsl.plan import backends
from rldsl.progress import stage

CORE = ("rldsl", "lark", "click", "networkx", "PyYAML", "Jinja2", "pygls")
COMPILER = "cc"  # as the torch backend calls it
SECONDS = 60.0  # for torch to be imported and to look for devices
# what a process that has torch prints of it, as JSON
PROBE = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "cuda": torch.version.cuda or "", "threads": torch.get_num_threads(),
    "instructions": torch.backends.cpu.get_cpu_capability(),
    "collectives": [n for n in ("gloo", "nccl") if getattr(torch.distributed, f"is_{n}_available")()]
                   if torch.distributed.is_available() else [],
    "devices": [f"{p.name}, {p.total_memory / 2**30:.0f} GiB"
                for p in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))] if cuda else [],
}))
"""


@dataclass(frozen=True, slots=True)
class Package:
    """A package that rldsl may use."""

    name: str     # as pip knows it
    version: str  # "" if it is not installed
    extra: str    # the extra of rldsl that brings it; "" for packages that rldsl itself needs


@dataclass(frozen=True, slots=True)
class Installation:
    """What `rlc doctor` found."""

    python: str                    # version of the interpreter
    system: str                    # operating system and processor
    cores: int                     # CPU cores that this process may use
    shared_memory: int             # free bytes of /dev/shm; 0 where there is none
    cache: str                     # directory of cached descriptions; "" if there is none
    packages: tuple[Package, ...]  # those of rldsl itself first, then those of extras
    compiler: str                  # path of the C compiler that makes kernels for CPUs; "" if there is none
    torch: Mapping[str, Any]       # what PROBE printed; {"error": ...} if it failed; {} without torch
    backends: Mapping[str, str]    # backend -> "" if it can be used, else what it needs

    @property
    def problems(self) -> tuple[str, ...]:
        """What does not work, each with its remedy. An extra that is not installed is no problem."""
        found = [f"{p.name} is not installed: run `pip install rldsl` again"
                 for p in self.packages if not p.extra and not p.version]
        if error := self.torch.get("error"):
            found.append(f"torch is installed and cannot be used: {error}")
        return tuple(found)

    @property
    def missing_extras(self) -> tuple[str, ...]:
        """Extras of which a package is missing and could be used here."""
        unusable = set() if self.torch.get("devices") else {"flash"}  # flash-attn needs a GPU
        return tuple(sorted({p.extra for p in self.packages if p.extra and not p.version} - unusable))

    def json(self) -> dict[str, Any]:
        return {**asdict(self), "problems": self.problems, "missing_extras": self.missing_extras}

    def text(self) -> str:
        """As lines for people."""
        rows = [("python", f"{self.python}, {self.system}"),
                ("cores", f"{self.cores}"),
                ("shared memory", f"{self.shared_memory / 2**30:.1f} GiB free"),
                ("cache", self.cache or "none (RLDSL_CACHE=off, or no home directory)"), ("", "")]
        rows += [(p.name, p.version or (f"not installed (rldsl[{p.extra}])" if p.extra else "not installed"))
                 for p in self.packages]
        if self.torch and "error" not in self.torch:
            devices = self.torch["devices"] or [f"none: runs use the CPU ({self.torch['instructions']})"]
            rows += [("", ""), ("GPUs", "; ".join(devices)), ("collectives", ", ".join(self.torch["collectives"]))]
            rows += [("CPU kernels", f"compiled with {self.compiler}" if self.compiler and self.cache else
                      f"none, torch's operators run: needs {'a cache' if self.compiler else f'`{COMPILER}`'}")]
        rows += [("", ""), *((f"backend {name}", need and f"needs {need}" or "usable")
                             for name, need in self.backends.items())]
        width = max(len(name) for name, _ in rows)
        lines = [f"{name.ljust(width)}  {value}".rstrip() for name, value in rows]
        if self.missing_extras:
            lines += ["", f"to install what is missing: pip install 'rldsl[{','.join(self.missing_extras)}]'"]
        return "\n".join([*lines, *(f"problem: {p}" for p in self.problems)])


def examine() -> Installation:
    """Packages, devices and backends of this machine."""
    packages = [Package(name, _version(name), "") for name in CORE]
    for name, extra in sorted(EXTRA_OF.items(), key=lambda item: (item[1], item[0])):
        distribution = DISTRIBUTION_OF.get(name, name)
        packages.append(Package(distribution, _version(distribution), extra))
    try:
        shared = shutil.disk_usage("/dev/shm").free
    except OSError:
        shared = 0
    described = {name: backends.described(name) for name in backends.names()}
    without_torch = "" if _version("torch") else "pip install 'rldsl[run]'"
    return Installation(
        platform.python_version(), f"{platform.system()} {platform.machine()}", len(os.sched_getaffinity(0)), shared,
        str(cache_folder() or ""), tuple(packages), shutil.which(COMPILER) or "", _torch(),
        {name: backends.lacking(d) or without_torch for name, d in described.items() if d is not None})


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _torch() -> dict[str, Any]:
    """What a separate process finds out about torch; {} without torch."""
    if find_spec("torch") is None:
        return {}
    stage("importing torch")
    try:
        done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {SECONDS:.0f} s (a driver that hangs?)"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][:300]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
