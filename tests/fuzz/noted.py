"""Functions of the random flows, all of them functions of the text alone."""


def parity(rows):
    return [float(sum(map(ord, row["completion"])) % 2) for row in rows]


def spread(rows):
    return [(sum(map(ord, row["prompt"] + row["completion"])) * 7919 % 1000) / 1000 for row in rows]


def alike(rows):
    others = [(row.get("other") or row)["completion"] for row in rows]  # prompts add none
    return [float(len({*row["completion"]} & {*other})) for row, other in zip(rows, others, strict=True)]


def ask(rows):
    return [row["completion"][:3] + "?" for row in rows]


def ask_some(rows):
    return [row["completion"][:2] + "=" if len(row["completion"]) % 2 else None for row in rows]
