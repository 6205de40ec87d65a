"""What runs is what was hashed: bytes of files and of the local modules that they import, in every process."""

from __future__ import annotations

import ast
import os
import py_compile
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rldsl.diag import Diagnostic, Failure
from rldsl.plan.function import Function
from rldsl.plan.local_modules import local_modules
from rldsl.runtime.rewards.pool import RewardPool
from tests.rewards.functions import mistake, recorded, written

ROWS = [{"prompt": "1+1=", "completion": str(i)} for i in range(6)]
SCORE = "def score(rows):\n    return [{} for _ in rows]\n"


def values(*functions: Function, workers: int = 2) -> list[float]:
    with RewardPool(list(functions), workers, 30.0, loading=30.0) as pool:
        return [pool.call(function, ROWS)[0] for function in functions]


def stale(path: Path, old: str, new: str) -> None:
    """`path` holds `new`; the cache that Python would take for it holds `old`."""
    assert len(old) == len(new)
    path.write_text(old)
    stamp = os.stat(path)
    py_compile.compile(str(path))
    path.write_text(new)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


def modules(path: Path) -> list[str]:
    return [name for name, _, _ in local_modules(str(path), ast.parse(path.read_bytes()))]


# what is recorded

def test_imports_are_followed_wherever_they_stand(tmp_path: Path) -> None:
    for file, text in {
        "a.py": "import b\n", "b.py": "", "unused.py": "", "late.py": "", "pack/__init__.py": "from . import inner\n",
        "pack/inner.py": "from .deep import x\n", "pack/deep/__init__.py": "x = 1\n", "pack/lonely.py": "",
        "space/part.py": "", "broken.py": "def (",
    }.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    main = tmp_path / "rewards.py"
    main.write_text("import json, a, broken\nfrom space import part\nimport pack.nothing, missing\nimport rldsl.plan\n"
                    "def score(rows):\n    from late import x\n")
    assert modules(main) == ["a", "b", "late", "pack", "pack.deep", "pack.inner", "space.part"]


def test_a_file_without_local_modules_records_none(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("")
    main = tmp_path / "rewards.py"
    main.write_text("import json, math\nfrom collections import abc\nname = 'helper'\n")
    assert modules(main) == []


def test_a_plan_keeps_them(tmp_path: Path) -> None:
    from rldsl.plan.codec import decode, encode
    from tests.plan import sample

    (tmp_path / "helper.py").write_text("x = 1\n")
    function = written(tmp_path, "import helper\n" + SCORE.format("helper.x"))
    plan = replace(sample.grpo(), functions=(function,))
    assert decode(encode(plan), "p").functions == (function,) and function.modules[0][0] == "helper"


def test_the_compiler_records_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rldsl.graph.build import build_recovering, read_text
    from rldsl.source import SourceFile
    from rldsl.syntax.parse import parse_recovering

    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/helper.py").write_text("import common\n")
    (tmp_path / "common.py").write_text("x = 1\n")
    (tmp_path / "sub/rewards.py").write_text("import helper\n" + SCORE.format("1.0"))
    text = """use py "sub/rewards.py" (score: g -> seq)
data d = jsonl("d.jsonl", batch=2)
model a = causal_lm("model")
flow f(steps=1) {
  p = d.next()
  g = a.generate(p, max_new_tokens=2)
  metric x = mean(score(g))
}
"""
    graph, problems = build_recovering(parse_recovering(SourceFile("p.rlf", text))[0], {}, None, read_text)
    assert graph is not None and not problems
    (function,) = graph.functions
    assert [(name, path) for name, path, _ in function.modules] == \
        [("common", "common.py"), ("helper", "sub/helper.py")]
    assert values(function) == [1.0]
    (tmp_path / "common.py").write_text("x = 2\n")
    assert mistake(function).code == "RL0772"


# what runs

@pytest.mark.parametrize("workers", [0, 2])
def test_a_stale_cache_of_the_file_does_not_run(tmp_path: Path, workers: int) -> None:
    stale(tmp_path / "rewards.py", SCORE.format("0.0"), SCORE.format("1.0"))
    assert values(recorded(tmp_path / "rewards.py"), workers=workers) == [1.0]


@pytest.mark.parametrize("late", [False, True])
def test_a_stale_cache_of_a_local_module_does_not_run(tmp_path: Path, late: bool) -> None:
    stale(tmp_path / "helper.py", "x = 0.0\n", "x = 1.0\n")
    body = "def score(rows):\n    import helper\n    return [helper.x for _ in rows]\n" if late else \
        "import helper\n" + SCORE.format("helper.x")
    assert values(written(tmp_path, body)) == [1.0]


def test_a_module_of_a_package_runs_from_its_source(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/__init__.py").write_text("from .inner import x\n")
    stale(tmp_path / "pack/inner.py", "x = 0.0\n", "x = 1.0\n")
    assert values(written(tmp_path, "from pack import x\n" + SCORE.format("x"))) == [1.0]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_changed_module_is_refused_before_anything_runs(tmp_path: Path, workers: int) -> None:
    helper = tmp_path / f"changed{workers}.py"
    helper.write_text("x = 1.0\n")
    ran = tmp_path / "ran"
    function = written(tmp_path, f"open({str(ran)!r}, 'w')\ndef score(rows):\n    import changed{workers}\n"
                                 "    return [1.0] * len(rows)\n")
    helper.write_text("x = 2.0\n")
    found = mistake(function, workers)
    assert found.code == "RL0772" and found.place == str(helper) and not ran.exists()


def test_a_module_that_is_gone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("")
    function = written(tmp_path, "import helper\n" + SCORE.format("1"))
    (tmp_path / "helper.py").unlink()
    found = mistake(function)
    assert found.code == "RL0771" and found.place == str(tmp_path / "helper.py")


def test_a_late_import_runs_what_was_compared_even_if_the_file_changes_in_between(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("x = 1.0\n")
    function = written(tmp_path, "def score(rows):\n    import helper\n    return [helper.x for _ in rows]\n")
    with RewardPool([function], 1, 30.0) as pool:
        (tmp_path / "helper.py").write_text("x = 2.0\n")
        assert pool.call(function, ROWS)[0] == 1.0


DYNAMIC = "import importlib\ndef score(rows):\n    {}\n    return [1.0] * len(rows)\n"


@pytest.mark.parametrize("body", [
    "importlib.import_module('hel' + 'per')",
    "exec('try:\\n import helper\\nexcept Exception:\\n pass')",
    "exec('from pack import part')",
])
def test_a_module_that_was_not_recorded_is_refused_even_where_the_code_catches_it(tmp_path: Path, body: str) -> None:
    (tmp_path / "helper.py").write_text("x = 1\n")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/part.py").write_text("x = 1\n")
    found = mistake(written(tmp_path, DYNAMIC.format(body)))
    assert found.code == "RL0770" and ("`helper`" in found.title or "`pack.part`" in found.title)
    assert "import" in found.notes[0]


def test_a_planted_compiled_module_is_refused(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("x = 1\n")
    py_compile.compile(str(tmp_path / "helper.py"), cfile=str(tmp_path / "helper.pyc"))
    (tmp_path / "helper.py").unlink()
    found = mistake(written(tmp_path, "import helper\n" + SCORE.format("helper.x")))
    assert found.code == "RL0770" and "source" in found.help


def test_a_file_that_appears_after_compilation_is_refused(tmp_path: Path) -> None:
    function = written(tmp_path, "try:\n    import fast\nexcept ImportError:\n    fast = None\n" + SCORE.format("1.0"))
    assert values(function) == [1.0]
    (tmp_path / "fast.py").write_text("")
    assert mistake(function).code == "RL0770"


def test_two_files_with_different_modules_of_one_name_are_refused(tmp_path: Path) -> None:
    functions = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "shared_name.py").write_text(f"x = '{name}'\n")
        functions.append(replace(written(folder, "import shared_name\n" + SCORE.format("1.0")), id=name))
    found = failure(*functions)
    assert found.code == "RL0770" and "`shared_name`" in found.title


def failure(*functions: Function) -> Diagnostic:
    with pytest.raises(Failure) as caught:
        values(*functions)
    return caught.value.diagnostics[0]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes_of_users_run_the_same_bytes(tmp_path: Path, method: str) -> None:
    stale(tmp_path / "helper.py", "def work(x): return 0.0\n", "def work(x): return 1.0\n")
    body = ("import multiprocessing, helper\ndef score(rows):\n"
            f"    with multiprocessing.get_context({method!r}).Pool(1) as pool:\n"
            "        return pool.map(helper.work, range(len(rows)))\n")
    assert values(written(tmp_path, body), workers=1) == [1.0]


def test_installed_packages_and_directories_of_data_are_not_ours(tmp_path: Path) -> None:
    (tmp_path / "numpy").mkdir()  # a directory of data, not a module
    (tmp_path / "numpy/rows.txt").write_text("")
    assert values(written(tmp_path, "import numpy\n" + SCORE.format("numpy.float64(1)"))) == [1.0]


def test_an_extension_runs_from_the_bytes_that_were_compared(tmp_path: Path) -> None:
    import _json

    source = getattr(_json, "__file__", None)
    if source is None:
        pytest.skip("this Python has its extensions built in")
    copy = tmp_path / Path(source).name.replace("_json", "_json_copy")
    copy.write_bytes(Path(source).read_bytes())
    function = written(tmp_path, "def score(rows):\n    import _json_copy\n    return [1.0] * len(rows)\n")
    assert [name for name, _, _ in function.modules] == ["_json_copy"]
    copy.write_bytes(b"not the same")
    assert mistake(function).code == "RL0772"


@pytest.mark.parametrize("workers", [0, 1])
def test_the_directory_is_no_longer_a_place_of_unhashed_modules(tmp_path: Path, workers: int) -> None:
    body = "import sys, os\nhere = os.path.dirname(os.path.abspath(__file__))\n"
    body += SCORE.format("float(here in sys.path)")
    assert values(written(tmp_path, body), workers=workers) == [0.0]
    assert str(tmp_path) not in sys.path


@pytest.mark.parametrize("workers", [0, 1])
def test_a_library_does_not_get_a_file_of_the_folder_by_its_name(tmp_path: Path, workers: int) -> None:
    """A stray `wire.py` next to the program, which no local file imports: the library finds its own."""
    site, here = tmp_path / "site", tmp_path / "here"
    for folder, files in {site: {"library.py": "import wire\nx = wire.x\n", "wire.py": "x = 1.0\n"},
                          here: {"wire.py": "x = 5.0\n"}}.items():
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
    body = f"import sys\nsys.path.append({str(site)!r})\n"
    before = set(sys.modules)
    try:
        assert values(written(here, body + "import library\n" + SCORE.format("library.x")), workers=workers) == [1.0]
        if workers:  # where no local module was imported before: users' own import of it is refused as ever
            asked = mistake(written(here, body + "import library\ndel sys.modules['wire']\nexec('import wire')\n"
                                    + SCORE.format("1.0")))
            assert asked.code == "RL0770" and "`wire`" in asked.title
    finally:
        sys.path[:] = [p for p in sys.path if p != str(site)]
        for name in set(sys.modules) - before:
            del sys.modules[name]


def test_what_a_library_looks_for_in_vain_is_not_there(tmp_path: Path) -> None:
    """A file of the folder is not what it means."""
    site, here = tmp_path / "site", tmp_path / "here"
    site.mkdir()
    here.mkdir()
    (site / "optional.py").write_text("try:\n    import faster_codec\n    x = 5.0\nexcept ImportError as error:\n"
                                      "    x = float('is not part of the plan' in str(error))\n")
    (here / "faster_codec.py").write_text("")
    body = f"import sys\nsys.path.append({str(site)!r})\nimport optional\n" + SCORE.format("optional.x")
    assert values(written(here, body), workers=1) == [1.0]


def test_a_recorded_module_is_also_for_libraries(tmp_path: Path) -> None:
    """As for those that import what users name."""
    (tmp_path / "plugin.py").write_text("x = 1.0\n")
    body = "import pydoc\ndef score(rows):\n    found = pydoc.locate('plugin').x\n    import plugin\n"
    assert values(written(tmp_path, body + "    return [found for _ in rows]\n"), workers=1) == [1.0]
