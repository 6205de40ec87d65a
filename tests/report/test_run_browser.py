"""The page of a run in a headless Chromium: curves by mouse and keyboard, smoothing, filters, samples, and the page that
follows a run. Skipped where there is no Chromium."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rldsl.commands.report_run import run_page
from tests.report.browser import Page, wait
from tests.report.runs import TURNS, line, make_run, sample, write_lines

REWARD = "document.querySelector('[data-metric=reward]')"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs")
    one, two = make_run(folder / "a"), make_run(folder / "b", steps=3, params={"lr": 2e-6})
    turns = {"stopped": "done", "turns": TURNS}
    write_lines(one / "samples/gen.jsonl", [sample(1, 0, conversation=turns), sample(1, 1), sample(5, 0), sample(5, 1)])
    write_lines(one / "metrics.jsonl", [line(1), line(2), line(3, reward=None), line(4), line(5, **{"kl": -0.5})])
    return run_page(str(one), against=str(two)).html()


@pytest.fixture
def file(made: str, tmp_path: Path) -> Path:
    """A place of its own for each test: a page keeps by its address what a reader has set."""
    found = tmp_path / "a.html"
    found.write_text(made)
    return found


@pytest.fixture
def shown(browser: Page, file: Path) -> Page:
    browser.errors.clear()
    browser.requests.clear()
    browser.size(1440, 900)
    browser.scheme("light")
    browser.open(file)
    return browser


def put(page: Page, id: str, value: Any) -> None:
    field = "checked" if isinstance(value, bool) else "value"
    page.run(f"(() => {{ const x = document.getElementById('{id}'); x.{field} = {json.dumps(value)}; "
             "x.dispatchEvent(new Event('input')); })()")


@pytest.mark.parametrize("width", [320, 390, 768, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_the_screen(shown: Page, file: Path, width: int, scheme: str) -> None:
    shown.size(width, 844)
    shown.scheme(scheme)
    shown.open(file)
    shown.run("document.querySelectorAll('details').forEach((x) => { x.open = true })")
    assert shown.run("document.documentElement.scrollWidth") == width
    assert not shown.errors and {*shown.requests} == {file.resolve().as_uri()}


def test_every_metric_with_numbers_has_curves(shown: Page) -> None:
    assert shown.run("[...document.querySelectorAll('.metric')].every((x) => x.querySelector('path.run0'))") is True
    assert shown.run("document.querySelectorAll('[data-metric=reward] path.run1').length") == 1
    assert shown.run("document.querySelectorAll('[data-metric=kl] path.run1').length") == 0
    assert shown.run(f"{REWARD}.querySelector('path.run0').getAttribute('d').match(/M/g).length") == 2  # a gap


def test_the_pointer_reads_one_step_in_all_curves(shown: Page) -> None:
    last = "[...document.querySelectorAll('.metric .now')].map((x) => x.textContent).join()"
    before = shown.run(last)
    x, y = shown.run(f"(() => {{ {REWARD}.scrollIntoView({{block: 'center'}}); const r = "
                     f"{REWARD}.querySelector('.plot').getBoundingClientRect(); return [r.right - 12, r.y + 50] }})()")
    shown.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    wait(shown, f"{last}.includes('step 5')")
    assert "runs/a" not in shown.run(last)
    assert "step 5: 0.5" in shown.run(f"{REWARD}.querySelector('.now').textContent")
    assert "step 3: 0.3" in shown.run(f"{REWARD}.querySelector('.now').textContent")  # the last of the other run
    assert shown.run("[...document.querySelectorAll('.cross')].every((x) => x.getAttribute('visibility') === 'visible')")
    shown.send("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
    wait(shown, f"{last} === {json.dumps(before)}")


def test_the_keyboard_reads_them_too(shown: Page) -> None:
    shown.run(f"{REWARD}.focus()")
    said = "document.getElementById('reading').textContent"
    for key, text in (("Home", "step 1: 0.1"), ("ArrowRight", "step 2: 0.2"), ("ArrowRight", "step 3: not finite"),
                      ("ArrowLeft", "step 2"), ("End", "step 5"), ("ArrowRight", "step 5")):
        shown.key(key)
        assert text in shown.run(said), key
    shown.key("Escape")
    assert shown.run(said) == ""
    shown.key("x")
    assert shown.run(said) == "" and not shown.errors


def test_smoothing_and_scale_change_the_curve(shown: Page) -> None:
    drawn = f"{REWARD}.querySelector('path.run0:not(.raw)').getAttribute('d')"
    raw = shown.run(drawn)
    put(shown, "smoothing", "0.8")
    assert shown.run(drawn) != raw and shown.run(f"{REWARD}.querySelectorAll('.raw').length") == 2
    put(shown, "smoothing", "0")
    assert shown.run(drawn) == raw and shown.run(f"{REWARD}.querySelectorAll('.raw').length") == 0
    put(shown, "log-scale", True)
    assert shown.run(drawn) != raw
    put(shown, "log-scale", False)
    put(shown, "x-axis", "seconds")
    assert "10 s" in shown.run(f"{REWARD}.querySelector('svg').textContent")
    assert not shown.errors


def test_a_logarithm_of_what_has_none_is_not_drawn(shown: Page) -> None:
    drawn = "document.querySelector('[data-metric=kl] svg').outerHTML"
    before = shown.run(drawn)
    put(shown, "log-scale", True)
    assert shown.run(drawn) == before and "NaN" not in shown.run("document.body.innerHTML") and not shown.errors


def test_metrics_can_be_filtered(shown: Page) -> None:
    seen = "[...document.querySelectorAll('.metric')].filter((x) => x.offsetParent).map((x) => x.dataset.metric)"
    put(shown, "metric-filter", "rew, ACTOR/")
    assert shown.run(seen) == ["reward", "actor/loss"]
    put(shown, "metric-filter", "no such metric")
    assert shown.run(seen) == [] and shown.run("document.getElementById('reading').textContent") == "0 shown"
    put(shown, "metric-filter", "")
    assert len(shown.run(seen)) == 6


def test_samples_can_be_chosen_and_sorted(shown: Page) -> None:
    seen = ("[...document.querySelectorAll('.sample')].filter((x) => x.offsetParent)"
            ".map((x) => x.querySelector('.which').innerText)")
    assert len(shown.run(seen)) == 4
    put(shown, "sample-step", "1")
    assert shown.run(seen) == ["step 1 gen row 0", "step 1 gen row 1"]
    put(shown, "sample-sort", "reward")
    assert shown.run(seen) == ["step 1 gen row 1", "step 1 gen row 0"]
    put(shown, "sample-sort", "-reward")
    assert shown.run(seen) == ["step 1 gen row 0", "step 1 gen row 1"]
    put(shown, "sample-step", "")
    put(shown, "sample-filter", "multiply 2 3")
    assert shown.run(seen) == ["step 1 gen row 0"]
    put(shown, "sample-filter", "no such text")
    assert shown.run(seen) == [] and shown.run("document.getElementById('sample-count').textContent") == "0 shown"


def test_a_sample_opens_by_the_keyboard(shown: Page) -> None:
    shown.run("document.querySelector('.sample summary').focus()")
    for kind in ("keyDown", "keyUp"):
        shown.send("Input.dispatchKeyEvent", type=kind, key="Enter", windowsVirtualKeyCode=13, text="\r")
    wait(shown, "document.querySelector('.sample').open === true")
    assert "six 0" in shown.run("document.querySelector('.sample').innerText")


def test_what_the_plan_shows_is_there_and_works(shown: Page) -> None:
    shown.click("#simulated .slot rect")
    assert shown.run("document.getElementById('drawer').hidden") is False
    assert shown.run("document.querySelectorAll('#simulated .strip path').length") >= 1


def test_a_live_page_loads_itself_again_until_it_is_paused(browser: Page, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", steps=2, state="running")
    file, made = tmp_path / "live.html", run_page(str(folder))
    file.write_text(made.html(1))
    browser.open(file)
    browser.run("sessionStorage.clear()")
    put(browser, "smoothing", "0.5")
    write_lines(folder / "metrics.jsonl", [line(1), line(2), line(3)])
    file.write_text(made.html(1))
    wait(browser, "!!document.body && document.body.innerText.includes('step 3 of 5')", 20)
    assert browser.run("document.getElementById('smoothing').value") == "0.5"
    browser.click("#live button")
    browser.run("window.same = true")
    assert browser.run("new Promise((done) => setTimeout(() => done(window.same === true), 2500))") is True
    assert browser.run("document.querySelector('#live button').textContent") == "Continue"


def test_a_reader_is_not_interrupted(browser: Page, tmp_path: Path) -> None:
    file = tmp_path / "live.html"
    file.write_text(run_page(str(make_run(tmp_path / "a", steps=2, state="running"))).html(1))
    browser.open(file)
    browser.run("sessionStorage.clear(); document.querySelector('.sample').open = true; window.same = true")
    assert browser.run("new Promise((done) => setTimeout(() => done(window.same === true), 2500))") is True
