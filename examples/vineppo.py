"""Rewards of VinePPO: whether a response contains the answer, whether a continuation of its beginning does."""


def solved(rows):
    return [float(row["answer"] in row["completion"]) for row in rows]


def solves(rows):
    """A row is a continuation; its prompt is the prompt of the response `row["gen"]` with a part of the response."""
    whole = [(row["prompt"] + row["completion"])[len(row["gen"]["prompt"]):] for row in rows]
    return [float(row["answer"] in text) for row, text in zip(rows, whole)]
