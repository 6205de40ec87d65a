"""A MkDocs hook that generates the pages of the documentation site that are not in docs/*.md.

In: the pages. Out: the pages with links to repository files replaced by links to generated pages with their text, and
error codes linked to their `rlc explain` page; those pages; an index of all codes; the docstrings of `import rldsl` as
a page; how much a page counts in the search. Writes nothing into the repository.
Errors: PluginError for a link to a missing file, or an unknown code.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

import rldsl
from rldsl import explain
from rldsl.explain import show

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(\]\()((?:\.\./)+[^)#\s]+)(#[^)\s]*)?(\))")
_MARK = re.compile(r"^<!-- (?:rlf|sh|py|api|table|output|file)\b.*? -->\n", re.MULTILINE)
_FENCE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(?<![\w\[/])RL\d{4}\b(?!\])")
_EXAMPLE = re.compile(r"^```\w+ +([^\n]+)$", re.MULTILINE)
# how much a page counts in the search: (beginning of its address, factor), of which the first fits
BOOSTS = (("index", 4), ("tutorial", 4), ("install", 4), ("faq", 4), ("glossary", 2), ("howto/add-", 0.4), ("howto/", 8),
          ("coming-from/", 3), ("cluster.", 6), ("environments", 2), ("language", 1.5), ("algorithms", 1.5),
          ("errors/", 0.4), ("source/", 0.02), ("design", 0.3), ("verifier", 0.5), ("release", 0.3), ("", 1))
_LANGUAGES = {".rlf": "rlf", ".py": "python", ".yaml": "yaml", ".sbatch": "bash"}


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    made = {"errors/index.md": index(), "reference/python.md": reference(), **{f"errors/{code}.md": error(code) for code in explain.codes()}}
    for page in [f for f in files if f.src_uri.endswith(".md")]:
        for path in linked(page.src_uri, page.content_string):
            made.setdefault(f"source/{path}.md", source(path))
    for uri, text in made.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite the links of a page to pages of the site."""
    uri = page.file.src_uri
    page.meta.setdefault("search", {"boost": next(n for start, n in BOOSTS if uri.startswith(start))})

    def prose(part: str) -> str:
        part = _LINK.sub(lambda m: m[1] + target(uri, m[2]) + m[4], _MARK.sub("\n", part))
        return _CODE.sub(lambda m: coded(uri, m[0]), part)

    parts = _FENCE.split(markdown)
    parts[::2] = map(prose, parts[::2])
    return "".join(parts)


def linked(uri: str, text: str) -> list[str]:
    """Repository files outside docs/ that a page links to."""
    found = (m for part in _FENCE.split(text)[::2] for m in _LINK.finditer(part))
    paths = (normpath(f"docs/{PurePosixPath(uri).parent}/{m[2]}") for m in found)
    return sorted({p for p in paths if not p.startswith("docs/")})


def target(uri: str, link: str) -> str:
    """A link on page `uri`, rewritten: files outside docs/ are under source/."""
    path = normpath(f"docs/{PurePosixPath(uri).parent}/{link}")
    return link if path.startswith("docs/") else relpath(f"source/{path}.md", str(PurePosixPath(uri).parent))


def coded(uri: str, code: str) -> str:
    """An error code as a link to its page. A range (RL06xx) is not a code."""
    if code not in explain.codes():
        raise PluginError(f"{uri} names {code}, which does not exist")
    here = str(PurePosixPath(uri).parent)
    return code if uri == f"errors/{code}.md" else f"[{code}]({relpath(f'errors/{code}.md', here)})"


def source(path: str) -> str:
    """The page of a repository file, or of all files in a folder."""
    file = ROOT / path
    if not file.exists():
        raise PluginError(f"a page links to {path}, which does not exist")
    files = sorted(f for f in file.iterdir() if f.suffix in _LANGUAGES) if file.is_dir() else [file]
    parts = [f"# {path}\n"]
    for each in files:
        parts += [f"## {each.name}\n"] if len(files) > 1 else []
        parts.append(f"```{_LANGUAGES.get(each.suffix, 'text')}\n{each.read_text(encoding='utf-8').rstrip()}\n```\n")
    return "\n".join(parts)


def reference() -> str:
    """What `import rldsl` has, from the docstrings."""
    lines = ["# Python reference\n", "Generated from the docstrings. [The Python API](../api.md) explains how the parts "
             "belong together.\n"]
    for name in rldsl.__all__:
        found = getattr(rldsl, name)
        lines += [f"## {name}\n", *described(name, found)]
        members = [(n, m) for n, m in vars(found).items() if not n.startswith("_")] if inspect.isclass(found) else []
        for inner, member in members:
            function = member.fget if isinstance(member, property) else member
            if callable(function):
                lines += [f"### {name}.{inner}\n", *described(inner, function, isinstance(member, property))]
    return "\n".join(lines)


def described(name: str, found: Any, is_property: bool = False) -> list[str]:
    """The signature and the docstring of a function or class."""
    signature = inspect.signature(found)
    given = [p for p in signature.parameters.values() if p.name != "self"]
    returned = signature.return_annotation
    arrow = "" if returned is inspect.Signature.empty or inspect.isclass(found) else f" -> {returned}"
    called = signature.replace(parameters=given, return_annotation=inspect.Signature.empty)
    text = f"{name}: {returned}" if is_property else f"{name}{called}{arrow}"
    doc = inspect.getdoc(found) or ""
    if not doc:
        raise PluginError(f"{name} of rldsl has no docstring")
    return [f"```python\n{text}\n```\n", doc + "\n"]


def index() -> str:
    """All codes with their titles, by range."""
    lines = ["# Error codes\n", "The pages of `rlc explain`. [Error messages](../messages.md) explains their format.\n"]
    for start, word in explain.RANGES.items():
        lines += [f"## {start}xx: {word}", "", "| code | |", "|---|---|"]
        lines += [f"| {code} | {title.replace('|', chr(92) + '|')} |" for code, title in explain.codes().items()
                  if code.startswith(start)]
        lines.append("")
    return "\n".join(lines)


def error(code: str) -> str:
    """The page of a code, with a caption before each program instead of the words after its fence."""
    page = explain.page(code)
    if page is None:
        raise PluginError(f"{code} has no page")
    return _EXAMPLE.sub(lambda m: f"{first_upper(show.caption(m[1]))}\n\n{m[0].split()[0]}", page.text)


def first_upper(text: str) -> str:
    return text[:1].upper() + text[1:]
