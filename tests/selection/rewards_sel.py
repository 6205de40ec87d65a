"""Rewards that a random model earns by chance, all of them functions of the row alone."""


def parity(rows):
    return [float(sum(map(ord, row["completion"])) % 2) for row in rows]


def spread(rows):
    return [(sum(map(ord, row["completion"])) * 7919 % 1000) / 1000 for row in rows]


def column(rows):
    return [float(row["number"]) for row in rows]
