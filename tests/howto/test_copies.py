"""A page that cannot be followed is seen."""

from __future__ import annotations

import pytest

from tests.howto.copies import PageError, patched, product_files, steps

FILE = "a = 1\nb = 2\n\na = 1\nc = 3\n"


def test_a_change_is_made_where_its_context_is() -> None:
    assert patched(FILE, " a = 1\n-c = 3\n+c = 4\n", "f") == "a = 1\nb = 2\n\na = 1\nc = 4\n"
    assert patched(FILE, "+first\n a = 1\n b = 2\n", "f").startswith("first\na = 1\n")
    assert patched(FILE, " b = 2\n\n+x = 0\n", "f") == "a = 1\nb = 2\n\nx = 0\na = 1\nc = 3\n"


@pytest.mark.parametrize("diff", [
    " a = 1\n+x = 0\n", " d = 4\n+x = 0\n", " b = 2\n", "b = 2\n+x = 0\n", " a = 1\n+x\n c = 4\n"])
def test_context_that_is_missing_or_ambiguous_is_refused(diff: str) -> None:
    with pytest.raises(PageError):
        patched(FILE, diff, "f")


def test_steps_are_read_in_order() -> None:
    page = ("Text.\n\n```diff\n--- rldsl/a.py\n+x\n```\n\n<!-- file: p.rlf -->\n```text\nq\n```\n\n```bash\nls\n```\n"
            "<!-- file: backends/b.py -->\n```python\ny\n```\n")
    assert [(s.path, s.text, s.new) for s in steps(page)] == [
        ("rldsl/a.py", "+x\n", False), ("p.rlf", "q\n", True), ("backends/b.py", "y\n", True)]
    assert product_files(page) == ["backends/b.py", "rldsl/a.py"]
