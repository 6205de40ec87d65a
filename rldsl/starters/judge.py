"""A model as judge: what it is asked, and how its verdicts become numbers. A function takes the rows of a batch and
returns one result per row, in the same order.

A row is a dict: `prompt` and `completion` as text, `prompt_ids` and `completion_ids`, `finished` (the completion was
not cut off), and every column of the data file under its own name. `rlc` never imports this file; the run does.
"""

import re
from typing import Any

QUESTION = """Review the response to the question below.

Question: {question}
Response: {response}

Add one point each if the response is relevant, covers most of the question, is useful, is clear and complete, and is \
expert work. Explain your judgment in a few sentences, then end with "Score: " and the number of points.

Review: """


def review(rows: list[dict[str, Any]]) -> list[str]:
    """For each response a prompt that asks for a verdict. For a chat model, return a list of messages per row instead:
    [{"role": "user", "content": ...}]; its chat template renders them."""
    return [QUESTION.format(question=row["prompt"], response=row["completion"]) for row in rows]


def points(rows: list[dict[str, Any]]) -> list[float]:
    """The score of each verdict, from 0 to 5; -1 if it has none."""
    found = (re.findall(r"[Ss]core:\s*([0-5])(?!\d)", row["completion"]) for row in rows)
    return [float(scores[-1]) if scores else -1.0 for scores in found]
