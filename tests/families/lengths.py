def counted(rows):
    return [len(row["completion_ids"]) / 10 + 0.03 * sum(row["completion_ids"]) % 7 for row in rows]
