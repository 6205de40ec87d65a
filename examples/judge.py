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


def criticize(rows: list[dict]) -> list[str]:
    """A prompt about what is wrong with each response."""
    return [f"Question: {row['prompt']}\nAnswer: {row['completion']}\nWhat is wrong with it? " for row in rows]


def revise(rows: list[dict]) -> list[str]:
    """A prompt for a better response. Rows are critiques; `row["gen"]` is what each is about."""
    return [f"Question: {row['gen']['prompt']}\nAnswer: {row['gen']['completion']}\nCritique: {row['completion']}\n"
            "Better answer: " for row in rows]
