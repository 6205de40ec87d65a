"""Rewards that a random model earns by chance, all of them functions of the row alone."""


def parity(rows):
    return [float(sum(map(ord, row["completion"])) % 2) for row in rows]


def spread(rows):
    return [(sum(map(ord, row["completion"])) * 7919 % 1000) / 1000 for row in rows]


def column(rows):
    return [float(row["number"]) for row in rows]


def ask(rows):
    return [f"{row['prompt']}{row['completion']}?" for row in rows]


def ask_some(rows):
    return [None if len(row["completion"]) % 3 == 0 else f"is it {row['completion'][:2]}?" for row in rows]
