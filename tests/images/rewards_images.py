def count_a(rows):
    return [row["completion"].count("a") + 0.1 * len(row["completion_ids"]) for row in rows]
