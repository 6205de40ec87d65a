"""docs/howto/add-a-builtin.md on a copy: the built-in compiles, verifies and computes the right numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.howto.copies import PAGES, Copy, product_files, steps
from tests.tiny import make_all

PAGE = "add-a-builtin.md"
HAND = """  metric hand = (min(gen.logprobs) + max(gen.logprobs)) / 2
  metric hand_by_prompt = mean((min(gen.logprobs by prompt) + max(gen.logprobs by prompt)) / 2)
  metric average = mean(gen.logprobs)
}
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    made = Copy(tmp_path_factory.mktemp("builtin"), PAGE)
    make_all(made.root)
    program = made.root / "spread.rlf"
    program.write_text(program.read_text().rstrip().removesuffix("}") + HAND)
    return made


def test_it_takes_two_files_of_the_product() -> None:
    assert product_files((PAGES / PAGE).read_text()) == ["rldsl/plan/operators.py",
                                                         "rldsl/runtime/interpreter/expression_ops.py"]


@pytest.mark.thorough
def test_a_program_computes_it(copy: Copy) -> None:
    """As what the smallest and the largest element say, on values whose mean is another."""
    copy.rlc("compile", "spread.rlf", "-o", "spread.plan")
    copy.rlc("verify", "spread.plan")
    copy.run("spread.plan", "--out", "out")
    (line,) = (copy.root / "out/metrics.jsonl").read_text().splitlines()
    found = json.loads(line)
    assert found["all"] == pytest.approx(found["hand"], rel=1e-6)
    assert found["by_prompt"] == pytest.approx(found["hand_by_prompt"], rel=1e-6)
    assert len({round(found[name], 4) for name in ("all", "by_prompt", "average")}) == 3


@pytest.mark.thorough
def test_the_tests_that_the_page_names_try_it(copy: Copy) -> None:
    said = copy.python("-m", "pytest", "-p", "no:cacheprovider", "tests/runtime/test_evaluate.py",
                       "tests/runtime/test_nonfinite_elements.py", "-k",
                       "midrange or every_operator or every_reduction", "-o", "addopts=", "-v")
    assert all(f"test_reductions_of_tokens[{to}-midrange] PASSED" in said for to in ("seq", "prompt", "batch"))
    assert all(f"test_nan_makes_its_own_group_nan_and_no_other[midrange-{to}] PASSED" in said
               for to in ("seq", "prompt"))
    assert "test_every_operator_of_the_plan_is_tested PASSED" in said
    assert "test_every_reduction_is_compared PASSED" in said


def test_documentation_and_highlighters_are_written_from_the_record(copy: Copy) -> None:
    copy.python("-m", "pytest", "-q", "-p", "no:cacheprovider", "--update-golden", "tests/docs/test_pages.py",
                "tests/editors/test_words.py", "-k", "table_of_built_ins or built_in_functions")
    assert "`midrange(x by M)`" in (copy.root / "docs/language.md").read_text()
    assert "midrange" in (copy.root / "grammar/editors/vim/syntax/rlf.vim").read_text()


@pytest.mark.parametrize("wrong, code", [
    ("midrange(gen.finished by seq)", "RL0208"), ("midrange(gen.logprobs, 2)", "RL0204"), ("midrange(gen)", "RL0203")])
def test_mistakes_are_found(copy: Copy, wrong: str, code: str) -> None:
    text = (copy.root / "spread.rlf").read_text()
    (copy.root / "wrong.rlf").write_text(text.replace("midrange(gen.logprobs)\n", f"mean({wrong})\n"))
    assert code in copy.rlc("check", "wrong.rlf", fails=True)


def test_the_product_does_not_know_it(tmp_path: Path) -> None:
    """What the page shows comes from the page."""
    plain = Copy(tmp_path)
    (step,) = [s for s in steps((PAGES / PAGE).read_text()) if s.path == "spread.rlf"]
    (plain.root / step.path).write_text(step.text)
    assert "RL0101" in plain.rlc("check", "spread.rlf", fails=True)
