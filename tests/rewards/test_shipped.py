"""The rewards that come with the language."""

from __future__ import annotations

import time

import pytest
from rldsl.stdlib import rewards
from rldsl.stdlib.rewards import boxed, exact_match, final_answer, format_reward, in_box, last_number, math_equal


def one(function, completion: str, answer: object = "", **more: object) -> float:
    (found,) = function([{"prompt": "", "completion": completion, "answer": answer, **more}])
    assert type(found) is float
    return found


CASES = [
    (exact_match, " a  b\n", "a b", 1), (exact_match, "a b", "ab", 0), (exact_match, "A", "a", 0),
    (exact_match, "4", 4, 1), (exact_match, "b", ["a", "b"], 1), (exact_match, "b", [], 0), (exact_match, "", "", 1),
    (exact_match, "4 ", "4.0", 0), (last_number, "So 3 + 4 = 7.", "7", 1),
    (last_number, "so 1,234.50 in all", "1234.5", 1), (last_number, "7 then 8", "7", 0),
    (last_number, "it is -3", "-3", 1), (last_number, "it is 10-3", "3", 1), (last_number, "x 3", "y #### 3", 1),
    (last_number, "1e3", 1000, 1), (last_number, "none", "none", 0), (last_number, "", "1", 0),
    (last_number, "1.", "1", 1), (last_number, "1,2", "2", 1), (last_number, "0.10", "0.1", 1),
    (last_number, "٣", "3", 0), (last_number, ".5", "1/2", 0), (last_number, "9" * 5000, "9" * 5000, 0),
    (boxed, "so \\boxed{4}", "4", 1), (boxed, "\\boxed{3} no, \\boxed{4}", "4", 1),
    (boxed, "\\boxed{3} no, \\boxed{4}", "3", 0), (boxed, "\\boxed{\\frac{1}{2}}", "\\frac{1}{2}", 1),
    (boxed, "\\boxed{ a b }", "ab", 1), (boxed, "4", "4", 0), (boxed, "\\boxed{4", "4", 0),
    (boxed, "\\boxed{4}", "the proof: \\boxed{4}", 1), (boxed, "\\fbox{4}", "4", 0), (boxed, "\\boxed{\\}}", "\\}", 1),
    (boxed, "\\boxed{}", "4", 0), (math_equal, "thus \\boxed{\\frac{1}{2}}.", "0.5", 1),
    (math_equal, "work\n#### 72", "lots of 3\n#### 72", 1),
    (math_equal, "The answer is $\\frac{2}{4}$.", "\\frac12", 1), (math_equal, "Answer: x = 5", "5", 1),
    (math_equal, "a\nb\n12 cm", "12", 1), (math_equal, "I think so", "5", 0), (math_equal, "", "5", 0),
    (math_equal, "\\boxed{10**10**10}", "5", 0), (math_equal, "7", [5, 7], 1), (math_equal, "\\boxed{5", "5", 0),
    (math_equal, "The answer is", "5", 0), (format_reward, "<think>a</think><answer>b</answer>", "", 1),
    (format_reward, " <think>\na\n</think>\n<answer>b</answer>\n", "", 1),
    (format_reward, "<think>a</think> so <answer>b</answer>", "", 0), (format_reward, "<think>a</think>", "", 0),
    (format_reward, "<answer>b</answer><think>a</think>", "", 0),
    (format_reward, "x<think>a</think><answer>b</answer>", "", 0),
    (format_reward, "<think>a</think><answer>b</answer>x", "", 0),
    (format_reward, "<think>a<think></think><answer>b</answer>", "", 0),
    (format_reward, "<think>a</think><answer>b</answer><answer>c</answer>", "", 0), (format_reward, "", "", 0),
    (format_reward, "<think><answer></think></answer>", "", 0),
]


@pytest.mark.parametrize("function, completion, answer, wanted", CASES, ids=range(len(CASES)))
def test_one_row(function, completion: str, answer: object, wanted: int) -> None:
    assert one(function, completion, answer) == wanted


def test_thinking_may_begin_in_the_prompt() -> None:
    row = {"prompt": "2+2?\n<think>\n", "completion": "a</think><answer>b</answer>"}
    assert format_reward([row, row | {"prompt": "2+2?"}]) == [1.0, 0.0]


def test_rows_are_judged_by_themselves() -> None:
    rows = [{"prompt": "", "completion": c, "answer": a} for _, c, a, _ in CASES]
    for function in (exact_match, last_number, boxed, math_equal, format_reward):
        assert function(rows) == [function([row])[0] for row in rows] and function([]) == []


@pytest.mark.parametrize("function", [exact_match, last_number, boxed, math_equal])
def test_data_without_answers(function) -> None:
    with pytest.raises(LookupError, match="no column `answer`"):
        function([{"prompt": "", "completion": "1"}])


@pytest.mark.parametrize("text, wanted", [
    ("\\boxed{1}", "1"), ("\\boxed {1}", "1"), ("\\boxed{{1}{2}}", "{1}{2}"), ("\\boxed{\\boxed{1}}", "1"),
    ("\\boxed{1} \\boxed{2", "1"), ("\\boxed{a\\{b}", "a\\{b"), ("}} \\boxed{1}", "1"), ("\\boxed", None),
    ("\\boxed{", None), ("boxed{1}", None), ("", None),
])
def test_boxes(text: str, wanted: str | None) -> None:
    assert in_box(text) == wanted


@pytest.mark.parametrize("text, wanted", [
    ("a\n\\boxed{1}\n#### 2", "1"), ("#### 1\n#### 2", "2"), ("The answer is: 5\nbye", "5"), ("answer = 5", "5"),
    ("ANSWER IS 5", "5"), ("final answer is\n5", "5"), ("x\n\n5\n\n", "5"), ("", ""), ("\n", ""),
])
def test_final_answers(text: str, wanted: str) -> None:
    assert final_answer(text) == wanted


HUGE = [
    "\\boxed{" * 100_000, "}" * 500_000, "{" * 500_000, "1" * 500_000, "1," * 300_000, "answer " * 100_000,
    "answer is " * 100_000, "<think>" * 100_000, "-" * 500_000, "\n" * 500_000, "\\" * 500_001, "####" * 100_000,
    "\\boxed" + " " * 300_000, "answer" + " " * 300_000, "1e" * 200_000,
]


@pytest.mark.parametrize("text", HUGE, ids=range(len(HUGE)))
def test_huge_completions_are_judged_at_once(text: str) -> None:
    begun = time.process_time()
    for function in (exact_match, last_number, boxed, math_equal, format_reward):
        assert one(function, text, "7") == 0
    assert time.process_time() - begun < 20  # CPU seconds; what grows as the square takes minutes


def test_every_function_has_a_line_in_the_documentation() -> None:
    from pathlib import Path

    page = Path(__file__).parents[2].joinpath("docs/language.md").read_text()
    own = {n for n, f in vars(rewards).items() if getattr(f, "__module__", "") == rewards.__name__}
    public = {n for n in own if not n.startswith("_")}
    for_others = {"in_box", "final_answer", "whole"}  # for functions of users
    assert len(public) == 9 and public - for_others == {n for n in public if f"| `{n}` |" in page}
