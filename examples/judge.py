"""What a generative judge is asked in the examples, and how its verdicts become numbers.

A row is a dict: `prompt` and `completion` as text, every column of the data file under its own name, and the rows of
further arguments under theirs.
"""

import re


def ask(rows: list[dict]) -> list[str]:
    """A prompt for the judge about each response."""
    return [f"Question: {row['prompt']}\nAnswer: {row['completion']}\nRate the answer from 0 to 10. Rating: "
            for row in rows]


def grade(rows: list[dict]) -> list[float]:
    """The first number of each verdict, from 0 to 1; 0 without one."""
    found = (re.search(r"\d+(\.\d+)?", row["completion"]) for row in rows)
    return [min(float(number[0]), 10.0) / 10 if number else 0.0 for number in found]


def review(rows: list[dict]) -> list[str]:
    """A prompt for a verdict that ends with a score (after Yuan et al. 2024, arXiv:2401.10020, figure 2)."""
    return [f"Question: {row['prompt']}\nAnswer: {row['completion']}\nReview the answer. Add one point each if it is "
            "relevant, covers most of the question, is useful, is clear and complete, and is expert work. End with "
            "the total. Total points: " for row in rows]


def points(rows: list[dict]) -> list[float]:
    """The last score from 0 to 5 in each verdict; -1 without one."""
    found = (re.findall(r"(?<!\d)[0-5](?!\d)", row["completion"]) for row in rows)
    return [float(scores[-1]) if scores else -1.0 for scores in found]


def versus(rows: list[dict]) -> list[str]:
    """A prompt that compares two responses to a question. `row["gen"]` is the first, the row itself the second."""
    return [f"Question: {row['prompt']}\nAnswer 1: {row['gen']['completion']}\nAnswer 2: {row['completion']}\n"
            "The better answer is number " for row in rows]


def wins(rows: list[dict]) -> list[float]:
    """1 where a verdict first names answer 1, 0 where it names answer 2, 1/2 without either."""
    found = (re.search("[12]", row["completion"]) for row in rows)
    return [{"1": 1.0, "2": 0.0}[number[0]] if number else 0.5 for number in found]


def criticize(rows: list[dict]) -> list[str]:
    """A prompt about what is wrong with each response."""
    return [f"Question: {row['prompt']}\nAnswer: {row['completion']}\nWhat is wrong with it? " for row in rows]


def revise(rows: list[dict]) -> list[str]:
    """A prompt for a better response. Rows are critiques; `row["gen"]` is what each is about."""
    return [f"Question: {row['gen']['prompt']}\nAnswer: {row['gen']['completion']}\nCritique: {row['completion']}\n"
            "Better answer: " for row in rows]
