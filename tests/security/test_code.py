"""What the sources of the compiler, the runtime and the backends must never do, read from their syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}
CALLS = {"eval", "exec", "compile", "__import__"}  # of the built-ins; `x.eval()` is a method
METHODS = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
           "recv_object_list", "load_state_dict_from_url"}
CODE = {"import_module", "exec_module", "spec_from_file_location"}  # what brings Python in by name

# Each exception, and why it may stand.
ALLOWED = {
    ("rldsl/runtime/rewards/user_functions.py", "exec_module"): "the user's own file, by the hash in the plan",
    ("rldsl/runtime/rewards/user_functions.py", "spec_from_file_location"): "the same file",
    ("rldsl/runtime/metrics/writers.py", "import_module"): "packages that an option asks for, by names in the source",
    ("rldsl/python/train.py", "compile"): "`rldsl.compile`, of a program in the language",
    ("rldsl/__init__.py", "import_module"): "files of this package, by names in the source",
    ("rldsl/measure/call_costs.py", "import_module"): "a backend of this package, of a plan that was verified",
    ("rldsl/plan/backends.py", "import_module"): "the description of a backend that is a folder of this package",
    ("backends/torch/kernels/fixed_order.py", "import_module"): "a file of this package, which needs Triton",
    ("rldsl/cli/run.py", "shell"): "the name of a shell in a command's output; no process is started",
    ("backends/torch/kernels/optional_packages.py", "import_module"): "packages of kernels, by names in the source",
    ("rldsl/runtime/state/model_store.py", "import_module"): "a backend of this package: the verifier knows their names",
    ("rldsl/runtime/comm/arithmetic.py", "import_module"): "the same backends",
}


def sources() -> list[Path]:
    return sorted(p for top in ("rldsl", "backends") for p in (ROOT / top).rglob("*.py"))


def faults(text: str) -> Iterator[str]:
    """The forbidden names in a source text, once for each place."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            yield node.module or ""
        elif isinstance(node, ast.Call):
            yield from _call(node)


def _call(node: ast.Call) -> Iterator[str]:
    given = {k.arg: k.value for k in node.keywords}
    if isinstance(node.func, ast.Name) and node.func.id in CALLS:
        yield node.func.id
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
    if name in METHODS | CODE:
        yield name
    if owner == "torch" and name == "load" and not _is(given.get("weights_only"), True):
        yield "torch.load"
    if name in ("from_pretrained", "from_config") and owner.startswith("Auto"):
        if not _is(given.get("trust_remote_code"), False):
            yield f"{owner}.{name} without trust_remote_code=False"
        if name == "from_pretrained" and not _is(given.get("local_files_only"), True):
            yield f"{owner}.{name} without local_files_only=True"
    elif "trust_remote_code" in given and not _is(given["trust_remote_code"], False):
        yield "trust_remote_code"
    if given.get("shell") is not None and not _is(given["shell"], False):
        yield "shell"


def _is(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


@pytest.mark.thorough
def test_no_source_unpickles_evaluates_or_trusts() -> None:
    found = {(str(p.relative_to(ROOT)), fault) for p in sources() for fault in faults(p.read_text())}
    assert found - ALLOWED.keys() == set()


def test_every_exception_is_still_needed() -> None:
    found = {(str(p.relative_to(ROOT)), fault) for p in sources() for fault in faults(p.read_text())}
    assert ALLOWED.keys() - found == set()


@pytest.mark.parametrize("text, fault", [
    ("import pickle", "pickle"),
    ("from cloudpickle import loads", "cloudpickle"),
    ("x = eval('1')", "eval"),
    ("exec(text)", "exec"),
    ("torch.load(f)", "torch.load"),
    ("torch.load(f, weights_only=False)", "torch.load"),
    ("dist.all_gather_object(a, b)", "all_gather_object"),
    ("broadcast_object_list(a)", "broadcast_object_list"),
    ("AutoConfig.from_pretrained(p, local_files_only=True)", "AutoConfig.from_pretrained without trust_remote_code=False"),
    ("AutoConfig.from_pretrained(p, trust_remote_code=False)", "AutoConfig.from_pretrained without local_files_only=True"),
    ("load(p, trust_remote_code=True)", "trust_remote_code"),
    ("AutoModel.from_config(c, trust_remote_code=x)", "AutoModel.from_config without trust_remote_code=False"),
    ("subprocess.run(x, shell=True)", "shell"),
])
def test_the_walk_finds(text: str, fault: str) -> None:
    assert list(faults(text)) == [fault]


@pytest.mark.parametrize("text", ["self.body.eval()", "torch.load(f, weights_only=True)", "json.loads(x)", "re.compile(x)"])
def test_the_walk_lets_pass(text: str) -> None:
    assert not list(faults(text))
