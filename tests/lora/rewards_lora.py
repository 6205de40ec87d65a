"""A reward that a random model can earn: the number of digits, less a little for length."""


def digits(rows):
    return [sum(c.isdigit() for c in row["completion"]) - 0.1 * len(row["completion_ids"]) for row in rows]
