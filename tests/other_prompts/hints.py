"""Functions for the programs of these tests."""

import json
import os


def ask(rows):
    """A longer prompt for each response, of a length that differs from row to row; what it got goes to a file."""
    made = [f"{r['answer']} is {'a' * (r['number'] % 5)} {len(r['completion'])} so {r['prompt']}" for r in rows]
    if os.path.isdir("seen"):
        with open("seen/rows.jsonl", "a", encoding="utf-8") as file:
            for row, text in zip(rows, made):
                file.write(json.dumps({"ids": row["completion_ids"], "prompt": row["prompt_ids"], "text": text}) + "\n")
    return made


def hint(rows):
    return [f"{r['answer']}? {r['prompt']}" for r in rows]


def nothing(rows):
    return ["" for _ in rows]


def number(rows):
    return [3 for _ in rows]


def fails(rows):
    return [rows[0]["no such column"]]


def nobody(rows):
    return [None for _ in rows]
