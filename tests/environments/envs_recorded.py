"""A class as it is written for TRL's GRPOTrainer. It notes what it is asked."""

import json


class Sums:
    def reset(self, prompt, answer, log, **row):
        self.answer, self.log, self.last = answer, log, None
        self.calls = [["reset", answer, sorted(row)]]
        return " Add."

    def add(self, a: int, b: int) -> int:
        """Adds.

        Args:
            a: One.
            b: Two.
        """
        self.calls.append(["add", a, b])
        self.last = a + b
        return self.last

    async def halve(self, a: int) -> float:
        """Halves.

        Args:
            a: One.
        """
        self.calls.append(["halve", a])
        if a % 2:
            raise ValueError("odd")
        self.last = a // 2
        return self.last

    def get_reward(self) -> float:
        reward = float(self.last == self.answer)
        with open(self.log, "a") as file:
            file.write(json.dumps([*self.calls, reward]) + "\n")
        return reward
