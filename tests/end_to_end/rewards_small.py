"""A reward that a random model can earn: the share of digits, less a little for length. RECORD, when the prompt asks
for nothing, is how a test sees what was sampled: rows are appended to the file named in RLDSL_TEST_RECORD."""

import json
import os


def digits(rows):
    file = os.environ.get("RLDSL_TEST_RECORD")
    rewards = [sum(c.isdigit() for c in row["completion"]) - 0.1 * len(row["completion_ids"]) for row in rows]
    if file:
        with open(file, "a") as out:
            for row, reward in zip(rows, rewards):
                kept = {k: row[k] for k in ("prompt_ids", "completion_ids", "finished")}
                out.write(json.dumps({**kept, "reward": reward}) + "\n")
    return rewards
