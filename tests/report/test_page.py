"""The page of a plan: all that it must say is there, it needs and runs nothing else, the same plan gives the same."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from dataclasses import fields, is_dataclass, replace
from hashlib import sha256
from importlib import resources
from typing import Any

import pytest

from rldsl.memory import curves
from rldsl.pages import page
from rldsl.pages.memory import MOST
from rldsl.pages.recorded import read
from rldsl.plan.events import Free
from rldsl.plan.model import Plan
from rldsl.plan.projection import event_paths
from rldsl.simulate import Lengths
from tests.plan.sample import grpo
from tests.plan_views.plans import change
from tests.report.pages import H100, Outline, given, h100, made, trace, wide

SOURCE = "use py\n" * 8 + "  gen = actor.generate(prompt)  # <b>the line</b>\n"
BAD = '"\'><script>hacked = 1</script><img src=x onerror="hacked = 2">&amp;'


def test_the_head() -> None:
    found = made()
    for part in ("0123456789ab", "predicted step", "peak memory", "1 node of 4", "seed 1", "tokens/s on h100x8"):
        assert part in found.text, part


def test_every_inserted_event_has_its_reason() -> None:
    text = made().text
    for event, _ in event_paths(grpo()):
        if event.because and not isinstance(event, Free):
            assert event.because in text, event.id


def test_every_event_can_be_reached() -> None:
    found = made()
    ids = [e["id"] for _, e in found.elements if "id" in e]
    assert len(ids) == len(set(ids))
    assert {f"e{e.id}" for e, _ in event_paths(grpo())} <= set(ids)
    for _, e in found.elements:
        if "href" in e:
            assert e["href"] == "data:," or e["href"][1:] in ids, e


def test_every_picture_says_what_it_shows() -> None:
    found = made()
    assert all(e.get("aria-label") or e.get("aria-hidden") or "class" not in e for e in found.all("svg"))
    assert len(found.all("svg", class_="graph")) == 1 and len(found.all("svg", class_="bars")) == 1
    assert len(found.all("svg", class_="memory")) == len({c.ranks for c in curves(grpo())})
    assert found.all("html")[0]["lang"] == "en" and found.all("title")
    assert all("scope" in e for e in found.all("th"))
    assert all(e.get("aria-label") or e.get("data-zoom") == "0" for e in found.all("button"))


@pytest.mark.parametrize("level, most", [("h1", 1), ("h2", 6)])
def test_headings(level: str, most: int) -> None:
    assert len(made().all(level)) == most


# ---------------------------------------------------------------------------------------------- what it must not do


def renamed(value: Any, old: str, new: str) -> Any:
    """A record with a name replaced wherever it stands."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, tuple):
        return tuple(renamed(v, old, new) for v in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: renamed(getattr(value, f.name), old, new) for f in fields(value)})
    return value


def hostile() -> Plan:
    """A plan with markup wherever a text of somebody else may stand."""
    plan = change(grpo(), 4, because=BAD, at=f"{BAD}:3:1")
    for name in ("ref_lp", "actor", "prompt", "tasks"):
        plan = renamed(plan, name, f"{name}{BAD}")
    header = replace(plan.header, program=BAD, flow=BAD, compiler=BAD, params=((BAD, BAD),), sources=((BAD, BAD),))
    return replace(plan, header=header, models=tuple(replace(m, path=BAD) for m in plan.models))


def test_markup_in_a_plan_is_text() -> None:
    plan = hostile()
    cluster = replace(H100, name=BAD, source=BAD)
    recorded = read(json.dumps(trace(plan, what=BAD)), "x.json", plan)
    page_ = page(replace(given(plan, cluster, recorded), sources={BAD: BAD * 3}, assumed=True))
    found = Outline.of(page_)
    plain = made(recorded=read(json.dumps(trace(grpo())), "x.json", grpo()), grpo_rlf=SOURCE)
    assert {name for name, _ in found.elements} <= {name for name, _ in plain.elements}
    assert len(found.all("script")) == 1 and not found.all("img")
    assert not any(key.startswith("on") for _, e in found.elements for key in e)
    assert "<script>hacked" not in page_ and "hacked = 1" in found.text


def test_nothing_is_loaded() -> None:
    found = made()
    for _, e in found.elements:
        assert not {"src", "srcset", "action", "background", "poster", "data"} & e.keys(), e
        assert e.get("href", "#")[0] == "#" or e["href"] == "data:,"
    bare = re.sub(r'xmlns="http://www\.w3\.org/2000/svg"|"http://www\.w3\.org/2000/svg"', "", found.source)
    bare = re.sub(r"sha256-[A-Za-z0-9+/]+=*", "", bare)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", bare, re.IGNORECASE)


def test_the_policy_allows_one_script() -> None:
    found = made()
    policy = next(e["content"] for e in found.all("meta") if e.get("http-equiv") == "Content-Security-Policy")
    script = resources.files("rldsl").joinpath("templates", "report.js").read_text(encoding="utf-8")
    assert f"script-src 'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" in policy
    assert "default-src 'none'" in policy and script in found.source


def test_the_same_plan_gives_the_same_page() -> None:
    assert page(given()) == page(given())


def test_ten_thousand_ranks_make_a_small_page() -> None:
    small, large = made(wide(2)), made(wide(2560), cluster=h100(10240))
    assert "10,240" in large.text
    assert len(large.source) < 1.2 * len(small.source) < 200_000


# ------------------------------------------------------------------------------------------------------ what it says


def test_a_line_is_quoted_where_the_source_is_at_hand() -> None:
    found = made(grpo_rlf=SOURCE)
    assert "# <b>the line</b>" in found.text
    assert [e["id"] for e in found.all("span", class_="line")] == [f"source-0-{i}" for i in range(1, 10)]
    assert any(e["href"] == "#source-0-9" for e in found.all("a", class_="at"))
    assert "The source of the program is missing" not in found.text


def test_without_the_source_it_says_so() -> None:
    found = made()
    assert "The source of the program is missing" in found.text and not found.all("code", class_="quote")
    assert not found.all("a", class_="at") and found.all("span", class_="at")


@pytest.mark.parametrize("text", ["", "one line\n"])
def test_a_source_without_the_line_is_quoted_nowhere(text: str) -> None:
    assert not made(grpo_rlf=text).all("code", class_="quote")


def test_the_cluster_is_told() -> None:
    assert "You passed no cluster, so the report assumes this preset" in made(assumed=True).text
    named = made(cluster=replace(H100, name="ours", source="our bench"))
    assert "You passed no cluster" not in named.text and "Source of the cluster's numbers: our bench" in named.text
    assert "are estimated from operation counts" in named.text


def test_lengths_are_told() -> None:
    assert "sequences of 16 + 8 tokens (prompt and response) (the maximum)" in made().text
    told = page(replace(given(), lengths=Lengths(4, 3)))
    assert "sequences of 4 + 3 tokens" in told and "the maximum" not in told


@pytest.mark.parametrize("memory, shown", [(0, "74.5 GiB"), (1 << 34, "16.0 GiB")])
def test_the_limit_is_that_of_the_plan_or_of_the_cluster(memory: int, shown: str) -> None:
    plan = replace(grpo(), header=replace(grpo().header, memory=memory))
    assert f"of {shown} per device" in made(plan).text


def test_curves_near_the_limit_have_it_in_the_picture() -> None:
    plan = grpo()
    most = max(h.bytes for c in curves(plan) for h in c.holdings)
    near = made(replace(plan, header=replace(plan.header, memory=2 * most)))
    assert near.all("line", class_="limit") and "is above the range of the charts" not in near.text
    assert not made(plan).all("line", class_="limit") and "is above the range of the charts" in made(plan).text


def test_panels_are_few() -> None:
    assert 0 < len(made(wide(2560), cluster=h100(10240)).all("svg", class_="memory")) <= MOST


def test_an_event_in_full() -> None:
    text = made().text
    assert "e7 transfer gen.tokens because ref_lp reads gen where mesh(0:4) dp=4 → mesh(2:4) dp=2" in text
    assert "reads gen.tokens@s1 mesh(0:4) dp=4 written by e5" in text


# ---------------------------------------------------------------------------------------------------------- contrast


def rgb(color: str) -> list[float]:
    digits = color.lstrip("#")
    return [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]


def over(color: str, share: float, ground: str) -> str:
    mixed = [share * a + (1 - share) * b for a, b in zip(rgb(color), rgb(ground))]
    return "#" + "".join(f"{round(255 * c):02x}" for c in mixed)


def contrast(one: str, other: str) -> float:
    """WCAG 2.1, 1.4.3."""
    def light(color: str) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb(color)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    a, b = sorted((light(one), light(other)))
    return (b + 0.05) / (a + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_texts_can_be_read(dark: bool) -> None:
    css = "".join(resources.files("rldsl").joinpath("templates", f).read_text() for f in ("graph.css", "report.css"))
    found: dict[str, str] = {}
    for part in re.finditer(r"(@media \(prefers-color-scheme: dark\) \{\s*)?\.rlf \{(.*?)\}", css, re.DOTALL):
        if dark or not part[1]:
            found |= dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", part[2]))
    for text in ("ink", "soft", "accent", "danger", "realloc"):
        for ground in ("surface", "page"):
            assert contrast(found[text], found[ground]) >= 4.5, (text, ground)
    assert min(contrast(found[t], found["sunk"]) for t in ("ink", "soft")) >= 4.5
    assert contrast(found["realloc"], found["realloc-fill"]) >= 4.5
    for i in range(8):  # labels on bars, lines on nodes
        assert contrast(found["ink"], over(found[f"hue{i}"], 0.38, found["surface"])) >= 4.5, i
        assert contrast(found["soft"], over(found[f"hue{i}"], 0.17 if dark else 0.11, found["surface"])) >= 4.5, i
        assert contrast(found[f"hue{i}"], found["surface"]) >= 3, i


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
    assert contrast("#123456", "#123456") == 1


def test_models_have_their_own_colors_in_the_timeline() -> None:
    """Rows are ranks already, so a color by mesh would say nothing new."""
    from rldsl.pages.colors import model_styles

    styles = model_styles(grpo())
    assert len({*styles.values()}) == len(styles) > 1
    html = page(given())
    for name, style in styles.items():
        assert f'<li class="{style}"><span class="swatch"></span>{name}</li>' in html
        slots = re.findall(rf'class="slot ([^"]*)"[^>]*><title>{name}\\.', html)
        assert {*slots} <= {style}
    assert 'class="slot compute"' in html


def test_memory_is_drawn_over_time() -> None:
    """An event that takes half of the step takes half of the width."""
    from rldsl.pages.memory import LEFT, WIDTH, _edges

    found = given()
    durations = found.timeline.event_seconds()
    for curve in found.curves:
        edges = _edges(curve, durations)
        seconds = [durations.get(e, 0.0) for e in curve.events]
        widest = max(range(len(seconds)), key=seconds.__getitem__)
        share = (edges[widest + 1] - edges[widest]) / (WIDTH - LEFT)
        assert share == pytest.approx(seconds[widest] / sum(seconds), abs=0.004 * len(seconds))
        assert all(b > a for a, b in zip(edges, edges[1:])), "every event can be seen"
