"""The documentation site: built as `make docs` does, without a warning, and what is made for it on the way."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

import rldsl
from rldsl import explain
from tests.docs.pages import ROOT
from tests.report.browser import MISSING, Page, program, wait

PAGES = sorted(p.relative_to(ROOT / "docs") for p in (ROOT / "docs").rglob("*.md"))


def build(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)], cwd=root,
                          env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site") / "site"
    done = build(ROOT, out)
    assert done.returncode == 0, done.stderr
    return out


def text(html: str) -> str:
    """What a reader sees."""
    return unescape(re.sub(r"<[^>]+>", "", html))


class Addresses(HTMLParser):
    """Everything that a page makes a browser fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        wanted = {"script": "src", "link": "href", "img": "src", "iframe": "src"}.get(tag)
        self.found += [value for name, value in attrs if name == wanted and value]


def test_every_page_is_there_and_in_the_navigation(site: Path) -> None:
    home = (site / "index.html").read_text()
    for page in PAGES:
        address = str(page.with_suffix(".html"))
        assert (site / address).is_file() and f'href="{address}"' in home, address


def test_every_code_has_its_page(site: Path) -> None:
    listed = (site / "errors/index.html").read_text()
    for code, title in explain.codes().items():
        assert f'href="{code}.html"' in listed
        assert text(title).split("`")[0] in text((site / f"errors/{code}.html").read_text())


def test_codes_in_pages_lead_to_theirs(site: Path) -> None:
    assert 'href="../errors/RL0401.html"' not in (site / "cluster.html").read_text()
    assert 'href="errors/RL0711.html"' in (site / "cluster.html").read_text()
    assert 'href="../errors/RL0707.html"' in (site / "howto/memory.html").read_text()


def test_examples_of_codes_say_what_they_are(site: Path) -> None:
    page = text((site / "errors/RL0106.html").read_text())
    assert "Fails with rlc check --set lr_rate=0.1:" in page and "```" not in page


def test_files_of_the_repository_are_on_the_site(site: Path) -> None:
    page = (site / "source/examples/grpo.rlf.html").read_text()
    assert "std.grpo" in text(page) and 'href="source/examples/grpo.rlf.html"' in (site / "examples.html").read_text()
    assert "h200x8.yaml" in (site / "source/rldsl/clusters/presets.html").read_text()


def test_programs_are_colored(site: Path) -> None:
    for page in ("index.html", "tutorial.html", "language.html", "errors/RL0304.html"):
        html = (site / page).read_text()
        found = re.findall(r'<div class="language-rlf highlight">.*?</code>', html, re.DOTALL)
        assert found and all('<span class="k' in block and 'class="err"' not in block for block in found), page


def test_nothing_of_markdown_is_left(site: Path) -> None:
    for page in PAGES:
        html = (site / page.with_suffix(".html")).read_text()
        plain = text(re.sub(r"<(pre|code|script|style)\b.*?</\1>", "", html, flags=re.DOTALL))
        assert not re.search(r"^(\||- |```)|\]\(|<!-- ", plain, re.MULTILINE), page


def test_pages_fetch_nothing_from_elsewhere(site: Path) -> None:
    for page in (*PAGES, Path("errors/RL0304.md")):
        parser = Addresses()
        parser.feed((site / page.with_suffix(".html")).read_text())
        assert not [a for a in parser.found if a.startswith(("http:", "https:", "//"))], page


def test_the_search_finds_codes_and_words(site: Path) -> None:
    index = json.loads((site / "search/search_index.json").read_text())["docs"]
    assert any(d["location"].startswith("errors/RL0304") for d in index)
    assert any("adamw" in d["text"] and d["location"].startswith("language") for d in index)


def test_guides_count_more_in_the_search_than_codes_and_sources(site: Path) -> None:
    index = json.loads((site / "search/search_index.json").read_text())["docs"]
    boost = {d["location"]: d.get("boost", 1) for d in index if "#" not in d["location"]}
    for guide in ("howto/memory.html", "tutorial.html", "coming-from/trl.html"):
        assert boost[guide] > boost["language.html"] > boost["errors/RL0304.html"] > boost["source/examples/ppo.rlf.html"]
    assert boost["howto/add-a-builtin.html"] < boost["howto/memory.html"]


def test_the_reference_has_every_public_name_with_its_docstring(site: Path) -> None:
    page = text((site / "reference/python.html").read_text())
    for name in rldsl.__all__:
        doc = getattr(rldsl, name).__doc__
        assert " ".join(doc.split()[:4]) in " ".join(page.split()), name
    for member in ("Plan.simulate", "Run.metrics", "Diagnostics.errors"):
        assert member in page
    assert "Plan._repr_html_" not in page and "self" not in re.findall(r"\((\w+)", page)


@pytest.mark.skipif(program() is None, reason=MISSING)
def test_the_search_works_from_disk(site: Path) -> None:
    found = """[...document.querySelectorAll('.md-search-result__item > a')].map((x) => x.getAttribute('href'))"""
    with Page(str(program())) as page:
        for query, first in (("checkpoint", "howto/resume.html"), ("RL0304", "errors/RL0304.html")):
            page.open(site / "howto/data.html")
            page.run(f"""(() => {{ const box = document.querySelector('.md-search__input'); box.focus();
                box.value = '{query}'; for (const kind of ['keyup', 'input']) box.dispatchEvent(new Event(kind)) }})()""")
            wait(page, f"{found}.length > 0", 30)
            assert first in page.run(found)[0], query
        assert not page.errors and all(r.startswith(("file:", "data:")) for r in page.requests)


# ------------------------------------------------------------------------------------- the build can fail


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site with one page, which tests make wrong."""
    root = tmp_path_factory.mktemp("small")
    (root / "docs/errors").mkdir(parents=True)
    for name in ("site.py", "iframe-worker.js"):
        shutil.copy(ROOT / "docs" / name, root / "docs" / name)
    head = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[0]
    (root / "mkdocs.yml").write_text(head + "\nnav:\n  - index.md\n  - errors/index.md\n  - messages.md\n  - reference/python.md\n  - api.md\n")
    (root / "docs/messages.md").write_text("# Messages\n")
    (root / "docs/api.md").write_text("# API\n")
    return root


def outcome(root: Path, page: str, tmp_path: Path) -> Iterator[str]:
    (root / "docs/index.md").write_text(f"# Home\n\n{page}\n")
    done = build(root, tmp_path / "site")
    yield from [] if done.returncode == 0 else [done.stderr + done.stdout]


@pytest.mark.parametrize(("page", "words"), [
    ("[gone](gone.md) and [messages](messages.md#gone)", ("'gone.md'", "'messages.md#gone'")),  # both, at the end
    ("See RL9999.", ("RL9999",)), ("[gone](../examples/gone.rlf)", ("gone.rlf",)),
])
def test_a_wrong_page_is_refused(small: Path, page: str, words: tuple[str, ...], tmp_path: Path) -> None:
    (told,) = outcome(small, page, tmp_path)
    assert all(word in told for word in words), told


def test_a_right_page_is_built(small: Path, tmp_path: Path) -> None:
    page = "See RL0304, `RL9999` and RL03xx.\n\n```text\nRL9999 [x](../examples/gone.rlf)\n```"
    assert not list(outcome(small, page, tmp_path))
    assert text((tmp_path / "site/index.html").read_text()).count("RL9999") == 2
