"""What a plan touches on disk, before anything of it runs. In: a plan. Out: `Paths`, and the same as text.

`rlc show PLAN --paths` and the first rank of a run show it; `runtime/persist/allowed_paths.py` holds a run to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from posixpath import normpath
from typing import Any

from rldsl.diag import visible
from rldsl.plan.model import Plan
from rldsl.plan.projection import event_paths

OUT, STEP = "{out}", "{step}"
KERNEL = ("/proc", "/sys", "/dev")  # file systems whose files are views of the kernel and of its devices
SHARED_MEMORY = "/dev/shm"  # an ordinary file system in memory


@dataclass(frozen=True, slots=True)
class Paths:
    """Each path once, in the order of the plan."""

    # (what it is, path)
    reads: tuple[tuple[str, str], ...]
    # (path, its functions, sha256); a module that such files import has no functions
    python: tuple[tuple[str, tuple[str, ...], str], ...]
    # where models are saved, as the plan has it, with `{out}` and `{step}` not replaced
    writes: tuple[str, ...]

    def outside(self) -> tuple[str, ...]:
        """The writes that do not begin at `{out}`."""
        return tuple(path for path in self.writes if not path.startswith(f"{OUT}/"))


def paths(plan: Plan) -> Paths:
    reads = [(f"model {m.name}", m.path) for m in plan.models]
    reads += [(f"adapters of {m.name}", m.lora.path) for m in plan.models if m.lora and m.lora.path]
    for d in plan.data:
        reads += [(f"data {d.name}", d.path), *([(f"tokenizer of {d.name}", d.tokenizer)] if d.tokenizer else [])]
    reads += [(f"tokenizer of {f.label or f.id}", f.tokenizer) for f in plan.frames if f.tokenizer]
    files = dict.fromkeys((f.path, f.sha256) for f in plan.functions)
    python = tuple((path, tuple(f.name for f in plan.functions if (f.path, f.sha256) == (path, digest)), digest)
                   for path, digest in files)
    modules = dict.fromkeys((path, digest) for f in plan.functions for _, path, digest in f.modules)
    python += tuple((path, (), digest) for path, digest in modules)
    saved = dict.fromkeys(e.saves_to for e, _ in event_paths(plan) if e.saves_to is not None)
    return Paths(_once(reads), python, tuple(saved))


def _once(reads: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Each path once, with all its uses: the tokenizer of a data source is usually also that of a model."""
    found: dict[str, list[str]] = {}
    for what, path in reads:
        found.setdefault(path, []).append(what)
    return tuple((", ".join(dict.fromkeys(what)), path) for path, what in found.items())


def in_kernel_files(path: str) -> bool:
    """Whether an absolute path is in a file system of the kernel. Its files are not data: reading one may block, never
    end, or change something, even where it claims to be a regular file."""
    normal = normpath(path)
    return not _below(normal, SHARED_MEMORY) and any(_below(normal, top) for top in KERNEL)


def _below(path: str, top: str) -> bool:
    return path.lstrip("/").split("/")[: top.count("/")] == top.lstrip("/").split("/") and path.startswith("/")


def text(found: Paths, out: str = "OUT") -> str:
    """The same as text. out: the run's own directory."""
    lines = [*_part("reads", [f"{shown(path)} ({shown(what)})" for what, path in found.reads]),
             *_part("runs", [f"{shown(path)} ({_called(names)}; sha256 {shown(digest[:12])})"
                             for path, names, digest in found.python]),
             *_part("writes", [shown(out), *map(shown, found.outside())])]
    return "\n".join(lines)


def as_json(found: Paths) -> dict[str, Any]:
    """The same as JSON."""
    return {"reads": [{"path": path, "what": what} for what, path in found.reads],
            "python": [{"path": path, "functions": list(names), "sha256": digest}
                       for path, names, digest in found.python],
            "writes": list(found.writes)}


def _called(names: Sequence[str]) -> str:
    return ", ".join(map(shown, names)) or "imported"


def _part(word: str, entries: Sequence[str]) -> Iterable[str]:
    return (f"{word if i == 0 else '':<7} {entry}" for i, entry in enumerate(entries))


def shown(path: str) -> str:
    """`path` without control characters: a plan from an unknown source may hold some, which must not reach a
    terminal."""
    return visible(path)
