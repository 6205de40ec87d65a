"""What a row is, as numbers."""


def width(rows):
    """The length of the row's prompt, as the data has it."""
    return [float(len(row["prompt"])) for row in rows]


def fingerprint(rows):
    """Differs where completions do; at least 1."""
    return [1.0 + sum((i + 1) * c for i, c in enumerate(row["completion_ids"])) for row in rows]
