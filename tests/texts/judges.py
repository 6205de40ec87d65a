"""Functions for the programs of these tests."""

import json
import os


def ask(rows):
    return [f"{r['prompt']}{r['completion']}? the answer is {r['answer']}" for r in rows]


def ask_some(rows):
    return [None if r["number"] % 3 == 0 else f"is it {r['completion'][:2]}?" for r in rows]


def rewrite(rows):
    return [f"say {r['prompt']}" for r in rows]


def grade(rows):
    """How the text of the verdict and of what it is about agree; what it got goes to a file, where there is a folder for it."""
    if os.path.isdir("seen"):
        with open("seen/rows.jsonl", "a", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row) + "\n")
    return [_grade(r["completion"], r["gen"]["completion"]) for r in rows]


def _grade(verdict, response):
    return verdict.count("e") - len(verdict) % 3 + sum(c.isdigit() for c in response) / 8


def prefers(rows):
    return [len(set(r["completion"])) - len(set(r["b"]["completion"])) + r["number"] / 32 for r in rows]


def revise(rows):
    return [f"{r['gen']['completion']} or {r['completion'][:3]}?" for r in rows]


def short(rows):
    return [float(len(r["completion"])) for r in rows]
