"""The page in a headless Chromium: it says nothing on the console, asks for nothing, fits every screen, and its events,
pictures and zoom can be used by mouse and by keyboard. Skipped where there is no Chromium."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rldsl.pages import graph_svg, page
from rldsl.pages.recorded import read
from tests.plan.sample import grpo
from tests.report.browser import Page, wait
from tests.report.pages import H100, given, trace
from tests.report.test_page import BAD, SOURCE, hostile

HIDDEN = "document.getElementById('drawer').hidden"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("page") / "a.html"
    recorded = read(json.dumps(trace(grpo())), "run.json", grpo())
    found.write_text(page(given(recorded=recorded, grpo_rlf=SOURCE)))
    return found


@pytest.fixture
def shown(browser: Page, file: Path) -> Page:
    browser.errors.clear()
    browser.requests.clear()
    browser.size(1200, 900)
    browser.scheme("light")
    browser.open(file)
    return browser


def test_nothing_is_said_and_nothing_asked_for(shown: Page, file: Path) -> None:
    assert not shown.errors
    assert shown.requests == [file.resolve().as_uri()]
    assert shown.run("document.querySelectorAll('svg.graph, svg.bars, svg.memory').length") >= 4
    assert shown.run("document.querySelectorAll('svg.graph .node').length") == 13


@pytest.mark.parametrize("width", [320, 400, 768, 1200, 1920])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_the_screen(shown: Page, width: int, scheme: str) -> None:
    shown.size(width, 800)
    shown.scheme(scheme)
    assert shown.run("document.documentElement.scrollWidth") == width
    ground = shown.run("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(246, 247, 249)" if scheme == "light" else "rgb(16, 20, 26)")


def test_texts_stay_in_their_nodes(shown: Page) -> None:
    assert shown.run("""[...document.querySelectorAll('svg.graph .node')].filter((node) => {
        const box = node.querySelector('.shape').getBoundingClientRect();
        return [...node.querySelectorAll('text')].some((text) => {
            const r = text.getBoundingClientRect();
            return r.left < box.left || r.right > box.right || r.top < box.top - 1 || r.bottom > box.bottom + 1 }) })
        .map((node) => node.textContent)""") == []


def test_a_click_shows_the_event(shown: Page) -> None:
    assert shown.run(HIDDEN) is True
    shown.click("svg.graph [data-event='7'] .shape")
    assert shown.run(HIDDEN) is False
    text = shown.run("document.getElementById('drawer').innerText")
    assert "transfer" in text and "ref_lp reads gen" in text and "mesh(2:4) dp=2" in text
    assert shown.run("document.querySelectorAll('svg.graph .link.chosen').length") == 2
    assert shown.run("document.querySelectorAll('#inserted tr.chosen').length") == 1
    shown.click("#drawer a[data-event='5']")
    assert "actor.generate" in shown.run("document.getElementById('drawer').innerText")
    shown.key("Escape")
    assert shown.run(HIDDEN) is True
    assert shown.run("document.querySelectorAll('.chosen').length") == 0
    assert shown.run("document.activeElement.dataset.event") == "7"
    assert not shown.errors


@pytest.mark.parametrize("place", ["#simulated .slot rect", "#memory a .moment", "#inserted .ref", "#time th a"])
def test_every_picture_and_table_leads_to_events(shown: Page, place: str) -> None:
    shown.click(place)
    assert shown.run(HIDDEN) is False
    shown.click("#drawer .close")
    assert shown.run(HIDDEN) is True


def test_a_key_opens_it_too(shown: Page) -> None:
    shown.run("document.querySelector(\"svg.graph [data-event='14']\").focus()")
    shown.send("Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r")
    wait(shown, f"!{HIDDEN}")
    assert "actor.train" in shown.run("document.getElementById('drawer').innerText")


def test_the_time_can_be_zoomed(shown: Page) -> None:
    width = "document.querySelector('#simulated svg.bars').getBoundingClientRect().width"
    ticks = "[...document.querySelectorAll('#simulated .ticks text')].map((t) => t.textContent).join()"
    labels = "document.querySelectorAll('#simulated .slot text:not(.tight)').length"
    first, said, seen = shown.run(width), shown.run(ticks), shown.run(labels)
    for _ in range(3):
        shown.click("#simulated button[data-zoom='2']")
    assert shown.run(width) == pytest.approx(8 * first, rel=0.01)
    assert shown.run(ticks) != said and shown.run(labels) > seen
    assert shown.run("document.querySelector('#recorded').dataset.zoom") is None
    assert shown.run("document.documentElement.scrollWidth") == 1200
    scroll = shown.run("document.querySelector('#simulated .scroll').scrollLeft")
    assert scroll == pytest.approx(3.5 * first, rel=0.02)  # the middle stayed where it was
    shown.run("document.querySelector('#simulated .scroll').focus()")
    shown.key("-")
    assert shown.run(width) == pytest.approx(4 * first, rel=0.01)
    shown.key("0")
    assert shown.run(width) == pytest.approx(first, rel=0.01) and shown.run(ticks) == said
    shown.click("#simulated button[data-zoom='0.5']")
    assert shown.run(width) == pytest.approx(first, rel=0.01)
    assert not shown.errors


def test_labels_stay_in_their_bars(shown: Page) -> None:
    assert shown.run("""[...document.querySelectorAll('.slot text:not(.tight)')].every((text) =>
        text.getComputedTextLength() < text.parentNode.querySelector('.wait').getBoundingClientRect().width)""") is True


def test_a_label_stays_while_its_bar_goes_on_beyond_the_screen(shown: Page) -> None:
    """Zoomed in to the middle of the longest bar, its name is still there."""
    shown.run("""(() => { for (let i = 0; i < 6; i++) document.querySelector("#simulated button[data-zoom='2']").click();
        const bars = [...document.querySelectorAll('#simulated .slot .wait')];
        window.longest = bars.reduce((a, b) => a.getBoundingClientRect().width > b.getBoundingClientRect().width ? a : b);
        const scroll = document.querySelector('#simulated .scroll'), box = longest.getBoundingClientRect();
        scroll.scrollLeft += box.left + box.width / 2 - scroll.getBoundingClientRect().left; })()""")
    wait(shown, """longest.parentNode.querySelector('text').getBoundingClientRect().left >=
        document.querySelector('#simulated .scroll').getBoundingClientRect().left - 1""")
    assert shown.run("longest.parentNode.querySelector('text').classList.contains('tight')") is False


def test_labels_shorten_where_bars_are_narrow(shown: Page) -> None:
    """At some width of the screen a name is cut, and where there is room again it is whole."""
    texts = "[...document.querySelectorAll('#simulated .slot text:not(.tight)')].map((x) => x.textContent)"
    names = set(shown.run("[...document.querySelectorAll('#simulated .slot text')].map((x) => x.dataset.name)"))
    seen = set()
    for width in range(320, 1921, 100):
        shown.size(width, 900)
        seen |= set(shown.run(texts))
    assert any(text.endswith("…") for text in seen) and any(text in names for text in seen)
    assert all(any(text.rstrip("…") in name for name in names) and len(text) >= 3 for text in seen)
    shown.run("""(() => { for (let i = 0; i < 8; i++) document.querySelector("#simulated button[data-zoom='2']").click() })()""")
    assert any(text in names for text in shown.run(texts)) and not shown.errors


def test_memory_is_zoomed_with_the_events(shown: Page) -> None:
    wide = "document.querySelector('#simulated .strip').getBoundingClientRect().width"
    before = shown.run(wide)
    shown.click("#simulated button[data-zoom='2']")
    assert shown.run(wide) == pytest.approx(2 * before, rel=0.01)


def test_events_can_be_filtered(shown: Page) -> None:
    every = shown.run("document.querySelectorAll('#simulated svg .slot').length")

    def type_(text: str) -> tuple[int, str]:
        shown.run(f"""(() => {{ const box = document.querySelector('#simulated input'); box.value = {json.dumps(text)};
            box.dispatchEvent(new Event('input')); }})()""")
        return (shown.run("document.querySelectorAll('#simulated svg .slot:not(.faded)').length"),
                shown.run("document.querySelector('#simulated .matches').textContent"))

    count, said = type_("actor.train")
    assert 0 < count < every and said == f"{count} shown"
    more, _ = type_("actor.train, actor.generate")
    assert count < more < every
    assert type_("no such event") == (0, "0 shown")
    assert type_("") == (every, "")
    assert shown.run("document.querySelectorAll('#recorded .slot.faded').length") == 0 and not shown.errors


def test_without_scripts_a_link_leads_to_the_event(shown: Page, file: Path) -> None:
    shown.send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        shown.open(file)
        shown.click("svg.graph [data-event='7'] .shape")
        wait(shown, "document.querySelector('#e7:target') !== null")
        assert shown.run("document.querySelector('#e7').getBoundingClientRect().height") > 0
    finally:
        shown.send("Emulation.setScriptExecutionDisabled", value=False)


def test_markup_in_a_plan_does_not_run(browser: Page, tmp_path: Path) -> None:
    cluster = replace(H100, name=BAD, source=BAD)
    browser.errors.clear()
    (tmp_path / "bad.html").write_text(page(replace(given(hostile(), cluster), sources={BAD: BAD})))
    browser.open(tmp_path / "bad.html")
    browser.click("svg.graph [data-event='7'] .shape")
    assert browser.run("[typeof hacked, document.images.length, document.scripts.length]") == ["undefined", 0, 1]
    assert not browser.errors and browser.run("document.querySelector('h1').textContent") == BAD


def test_the_policy_holds_where_escaping_would_not(browser: Page, tmp_path: Path) -> None:
    (tmp_path / "broken.html").write_text(page(given()).replace("</h1>", f"</h1>{BAD}"))
    browser.open(tmp_path / "broken.html")
    assert browser.run("typeof hacked") == "undefined" and browser.run("document.images.length") == 1
    assert any("Content Security Policy" in e for e in browser.errors)
    assert all(r.startswith("file:") for r in browser.requests)


def test_the_graph_alone(browser: Page, tmp_path: Path) -> None:
    browser.errors.clear()
    (tmp_path / "graph.svg").write_text(graph_svg(grpo()))
    browser.open(tmp_path / "graph.svg")
    assert not browser.errors and browser.run("document.querySelectorAll('.node').length") == 13


def test_it_can_be_printed(shown: Page) -> None:
    shown.send("Emulation.setEmulatedMedia", media="print")
    try:
        assert shown.run("getComputedStyle(document.querySelector('nav')).display") == "none"
        assert shown.run("document.documentElement.scrollWidth") == 1200
    finally:
        shown.send("Emulation.setEmulatedMedia", media="")
    assert len(shown.send("Page.printToPDF")["data"]) > 10_000
