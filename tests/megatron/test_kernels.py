"""Transformer Engine, Apex and flash-attn: taken where they can be used, and never needed. Stand-ins (`standins.py`)
take their places on a device that is said to be CUDA: arguments are handed over as theirs are, and numbers stay."""

from __future__ import annotations

import io
import sys
import warnings
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rldsl.backends.megatron.kernels import (
    APEX,
    FLASH_ATTN,
    TRANSFORMER_ENGINE,
    Kernels,
    describe_kernels,
    hide_unusable,
    installed_packages,
    select_kernels,
)
from rldsl.backends.torch.kernels import optional_packages
from rldsl.backends.torch.kernels.optional_packages import Package, probe
from rldsl.diag import Failure
from rldsl.plan.model import Layout
from tests.backend_torch.shards import pack, plan_model
from tests.backend_torch.steps import run
from tests.backend_torch.test_train import OPTIONS, ROWS, UPDATES
from tests.megatron import standins
from tests.megatron.shards import layout_of as at
from tests.megatron.shards import make, needed, shard_of
from tests.world import run_world

needed()
TE, AX, FA = (wanted.title for wanted in (TRANSFORMER_ENGINE, APEX, FLASH_ATTN))
NONE = {wanted: Package(wanted.title) for wanted in (TRANSFORMER_ENGINE, APEX, FLASH_ATTN)}
ALL = {wanted: Package(wanted.title, "2.9") for wanted in NONE}

# ------------------------------------------------------------------------------------------------- what is chosen


@pytest.mark.parametrize("there, device, half, buffered, biases, wanted", [
    (ALL, "cuda", True, True, False, Kernels(TE, TE, FA)),
    (ALL, "cuda", True, False, False, Kernels(TE, "", FA)),  # zero=1: gradients are divided as they come
    (NONE | {APEX: ALL[APEX]}, "cuda", True, True, False, Kernels("", AX, "")),
    (NONE | {APEX: ALL[APEX]}, "cuda", True, False, False, Kernels()),
    (NONE | {APEX: ALL[APEX]}, "cuda", True, True, True, Kernels()),
    (ALL | {TRANSFORMER_ENGINE: Package(TE, "2.9", "broken")}, "cuda", True, True, True, Kernels("", "", FA)),
    (ALL, "cuda", False, True, False, Kernels()),
    (ALL, "cpu", True, True, False, Kernels()),
    (NONE, "cuda", True, True, False, Kernels())])
def test_what_is_chosen(there: Any, device: str, half: bool, buffered: bool, biases: bool, wanted: Kernels) -> None:
    assert select_kernels(there, device, half, buffered, biases) == wanted


@pytest.mark.parametrize("text, version, problem", [
    (None, "", ""),
    ("__version__ = '2.9.1+cu13'", "2.9.1+cu13", ""),
    ("__version__ = '2.8.0'", "2.8.0", "megatron-core 0.16 needs 2.9 or later, before 2.12"),
    ("__version__ = '2.12.0'", "2.12.0", "megatron-core 0.16 needs 2.9 or later, before 2.12"),
    ("", "", "megatron-core 0.16 needs 2.9 or later, before 2.12"),
    ("raise OSError('libcudnn.so.9: not there\\nmore')", "", "importing it fails (OSError: libcudnn.so.9: not there)"),
    ("import nothing_of_this_name", "", "importing it fails (ModuleNotFoundError: No module named"),
    ("__version__ = '2.9'; 1 / 0", "", "importing it fails (ZeroDivisionError: division by zero)")])
def test_what_is_found(text: str | None, version: str, problem: str, tmp_path: Path,
                       monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"kernels_{abs(hash(text))}"
    if text is not None:
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    package = probe(replace(TRANSFORMER_ENGINE, modules=(name,)))
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert package.version == version and package.problem.startswith(problem) and bool(problem) == bool(package.problem)
    lines = list(describe_kernels(Kernels(), NONE | {TRANSFORMER_ENGINE: package}))
    assert len(lines) == bool(problem) and all(problem in line and "\n" not in line for line in lines)


def test_a_line_says_what_is_taken() -> None:
    (line,) = describe_kernels(Kernels(TE, TE, FA), ALL)
    assert line == ("note: megatron-core uses Transformer Engine 2.9 (linear layers, gradients of matrices), "
                    "flash-attn 2.9 (attention)")
    assert not list(describe_kernels(Kernels(), ALL)) and not list(describe_kernels(Kernels(), NONE))


def test_without_cuda_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rldsl.backends.megatron.kernels.probe", None)
    assert installed_packages.__wrapped__("cpu") == NONE


def test_what_cannot_be_used_is_hidden_and_what_is_loaded_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for wanted in NONE:
        monkeypatch.delitem(sys.modules, wanted.modules[0], raising=False)
    monkeypatch.setitem(sys.modules, "flash_attn", sys)
    monkeypatch.setitem(sys.modules, "transformer_engine", sys)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", sys)
    hide_unusable(NONE | {TRANSFORMER_ENGINE: Package(TE, "1.4", "too old"), APEX: ALL[APEX]})
    with pytest.raises(ImportError):
        import transformer_engine.pytorch  # noqa: F401
    assert "apex" not in sys.modules and sys.modules["flash_attn"] is sys


# --------------------------------------------------------------------------------------- the same numbers with them


def pretend(*titles: str) -> None:
    """As if this were CUDA, with these packages. megatron-core is loaded anew, and finds them by itself."""
    standins.CALLS.clear()
    standins.forget("megatron", "rldsl.backends.megatron", "transformer_engine", "flash_attn", *APEX.modules)
    optional_packages.flash_attn.cache_clear()
    standins.install(*titles)
    from rldsl.backends.megatron import kernels
    from rldsl.backends.torch.model import attention, context_parallel

    there = kernels.installed_packages("cuda")
    kernels.installed_packages = lambda device: there
    kernels.hide_unusable(there)
    from rldsl.backends.megatron import stage

    stage.kernels_here = lambda device, *, half, grads_buffered, biases: kernels.select_kernels(
        there, "cuda", True, grads_buffered, biases)
    for file in (attention, context_parallel):
        file.has_varlen_kernel = lambda q: there[kernels.FLASH_ATTN].usable


def with_them(rank: int, titles: tuple[str, ...], cases: list[Any]) -> list[Any]:
    """As `test_families.seen`, or `steps`, and what the stand-ins were called with, and what is said."""
    from tests.megatron.test_families import plainly, seen

    plain = {path: plainly(path) for path, _, half in cases if not half}
    pretend(*titles)
    out = []
    for path, layouts, half in cases:
        standins.CALLS.clear()
        said = io.StringIO()
        with redirect_stderr(said):
            found = steps(rank, path, layouts) if half else seen(rank, path, layouts, *plain[path])
        out.append((found, {name: list(dict.fromkeys(map(repr, calls))) for name, calls in standins.CALLS.items()},
                    said.getvalue()))
    return out


def steps(rank: int, path: str, layouts: list[Layout]) -> list[Any]:
    """Norms of two steps in half precision."""
    model = plan_model(path, "causal_lm", OPTIONS, UPDATES, "bfloat16")
    made = ((layout, shard_of(model, layout, rank, True)) for layout in layouts)
    return [run(there[0], "logprobs", there[1], layout.dp, 2) for layout, there in made if there is not None]


def recomputed(rank: int, titles: tuple[str, ...], path: str) -> tuple[float, bool]:
    """How far the gradients of two passes are from those of passes whose layers run again, as a part of the largest;
    and whether the buffer is gone from all parameters while it is offloaded."""
    pretend(*titles)
    options = replace(OPTIONS, kind="sgd", clip_grad=0.0)  # AdamW would clear the gradients
    model, found = plan_model(path, "causal_lm", options, UPDATES), []
    for how in ("none", "full"):
        shard, _ = shard_of(model, at(dp=2), rank, True)
        shard.offload("optimizer")
        gone = all(p.grad is None and p.main_grad is None for p in seen_by_modules(shard))
        shard.onload("optimizer")()
        shard.train([(pack(ROWS[:6]),), (pack(ROWS[6:]),)], [("logprobs",)], 1.0,
                    lambda _, fresh: fresh[0]["logprobs"].square().sum() * 0.01, recompute=how)
        found.append(shard.trainer.grad_buffer.clone())
    return float((found[0] - found[1]).abs().max() / found[0].abs().max()), gone


def seen_by_modules(shard: Any) -> list[Any]:
    return [p for block in shard.stage.blocks for p in block.module_parameters]


def near(found: list[Any]) -> None:
    for x in found:
        assert x.exact and x.one and x.logprobs <= 1e-5 and x.gradients <= 1e-5, x


LAYOUTS = [at(), at(tp=2), at(dp=2, zero=1)]


@pytest.mark.thorough
def test_numbers_with_transformer_engine(tmp_path: Path) -> None:
    paths = {name: make(tmp_path, name) for name in ("qwen3", "llama", "mixtral")}
    cases = [(path, [*LAYOUTS, *([at(dp=2, ep=2)] if name == "mixtral" else [])], False)
             for name, path in paths.items()] + [(paths[name], LAYOUTS[:2], True) for name in ("qwen3", "llama")]
    dense, biased, mixed, *halves = run_world(2, with_them, (TE, AX), cases)[0]
    for case, calls, _ in (dense, biased, mixed):
        near(case)
        # as all of GPTModel on the meta device; gradients go to the buffer but under zero=1
        assert set(calls["Linear"]) == {str((mode, "meta", fused, tokens)) for mode in ("column", "row")
                                        for fused, tokens in ((True, False), (True, True), (False, False))}
        assert all("None, torch.float32" in c for c in calls["products"])  # no pass is the first, which would not add
        assert "gradients" not in calls and "attention" not in calls
    line = "note: megatron-core uses Transformer Engine 2.9.0+standin (linear layers"
    assert dense[2] == f"{line}, gradients of matrices)\n{line})\n"
    assert not biased[2]  # what is the same is said once
    assert mixed[1]["GroupedLinear"] == ["(4, 'meta', True)", "(4, 'meta', False)", "(2, 'meta', True)"]
    assert all("None" in call for call in mixed[1]["grouped"])
    for name, (norms, calls, _) in zip(("qwen3", "llama"), halves, strict=True):
        assert all("bfloat16" in call for call in calls["products"])
        plain = run_world(2, steps, paths[name], LAYOUTS[:2])[0]
        assert all(mine == pytest.approx(theirs, rel=1e-2) for mine, theirs in zip(norms, plain, strict=True))


@pytest.mark.thorough
def test_numbers_with_apex_and_flash_attn(tmp_path: Path) -> None:
    paths = {name: make(tmp_path, name) for name in ("qwen3", "mistral", "llama", "mixtral")}
    layouts = {"qwen3": [at(), at(tp=2), at(cp=2), at(dp=2, zero=1)], "mistral": [at(), at(cp=2)], "llama": [at()],
               "mixtral": [at(tp=2)]}
    cases = [(path, layouts[name], False) for name, path in paths.items()] + [(paths["qwen3"], LAYOUTS[:2], True)]
    dense, windows, biased, mixed, halves = run_world(2, with_them, (AX, FA), cases)[0]
    for case in (dense, windows, biased, mixed):
        near(case[0])
    assert dense[1]["gradients"] == mixed[1]["gradients"] == ["torch.float32"]
    assert halves[1]["gradients"] == ["torch.bfloat16"] and "gradients" not in biased[1]
    assert "(gradients of matrices), flash-attn 2.8.3 (attention)" in dense[2]
    scale = 8**-0.5  # of qwen3's heads
    assert all(f", {scale!r}, (-1, -1), [[" in call for call in dense[1]["attention"]), dense[1]["attention"][0]
    assert all("(2, 0), [[" in call for call in windows[1]["attention"])  # itself and two before
    assert all("torch.bfloat16" in call for call in halves[1]["attention"])


@pytest.mark.thorough
@pytest.mark.parametrize("titles", [(TE,), (AX,)])
def test_layers_that_run_again_add_once(titles: tuple[str, ...], tmp_path: Path) -> None:
    for apart, gone in run_world(2, recomputed, titles, make(tmp_path, "mixtral")):
        assert apart <= 1e-6 and gone


# ----------------------------------------------------------------------------------------------- what cannot be used


def with_broken(rank: int, path: str, folder: str) -> tuple[list[str], list[float], str]:
    """Packages whose import fails as no `except ImportError` expects, found first on the path."""
    sys.path.insert(0, folder)
    pretend()
    said = io.StringIO()
    with redirect_stderr(said):
        (first,) = steps(rank, path, [at()])
        steps(rank, path, [at()])
    from megatron.core.extensions.transformer_engine import HAVE_TE

    from rldsl.backends.megatron import stage

    kernels = stage.kernels_here("cuda", half=True, grads_buffered=True, biases=False)
    return [repr(kernels), str(HAVE_TE)], first, said.getvalue()


def test_broken_and_old_packages_leave_plain_kernels_and_a_line(tmp_path: Path) -> None:
    path, folder = make(tmp_path, "qwen3"), tmp_path / "site"
    (folder / "transformer_engine").mkdir(parents=True)
    (folder / "transformer_engine/__init__.py").write_text("raise OSError('libnvrtc.so: not there')\n")
    (folder / "flash_attn").mkdir()
    (folder / "flash_attn/__init__.py").write_text("__version__ = '1.0.9'\n")
    ((state, norms, said),) = run_world(1, with_broken, path, str(folder))
    (plain,) = run_world(1, steps, path, [at()])[0]
    assert state == [repr(Kernels()), "False"] and norms == plain
    assert said.splitlines() == [
        "note: Transformer Engine is not used; using torch kernels instead: importing it fails (OSError: libnvrtc.so: not "
        "there)",
        "note: flash-attn 1.0.9 is not used; using torch kernels instead: this backend needs 2.7 or later, before 3"]


def elsewhere(rank: int, path: str, version: str | None) -> tuple[str, ...]:
    """A plan on a machine with another megatron-core, or with none."""
    import importlib.metadata

    real = importlib.metadata.version
    if version is None:
        standins.forget("megatron")
        sys.modules["megatron"] = None  # type: ignore[assignment]
    importlib.metadata.version = lambda name: version if name == "megatron-core" and version else real(name)
    with pytest.raises(Failure) as caught:
        shard_of(plan_model(path), at(), rank)
    (d,) = caught.value.diagnostics
    return d.code, d.help, *d.notes


@pytest.mark.parametrize("version, notes", [
    ("0.15.2", ("megatron-core 0.15.2 is installed, but version 0.16 or later, before 0.17, is required",)), (None, ())])
def test_a_run_without_the_right_library_is_refused(version: str | None, notes: tuple[str, ...], tmp_path: Path
                                                    ) -> None:
    ((code, help, *said),) = run_world(1, elsewhere, make(tmp_path, "qwen3"), version)
    assert code == "RL0326" and "`pip install 'rldsl[megatron]'`" in help and tuple(said) == notes


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_recommendation_for_gpus_is_shown_on_gpus_alone(device: str) -> None:
    from rldsl.backends.megatron import harmless_warnings

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        for message in harmless_warnings(device):
            warnings.filterwarnings("ignore", message=message)
        warnings.warn("When using sequence parallelism it is recommended to set the environment variable "
                      "CUDA_DEVICE_MAX_CONNECTIONS to 1 for maximum speedup", stacklevel=1)
        warnings.warn("`torch.distributed.reduce_op` is deprecated", stacklevel=1)
        warnings.warn("another one", stacklevel=1)
    assert ["MAX_CONNECTIONS" in str(w.message) for w in shown] == ([True, False] if device == "cuda" else [False])
