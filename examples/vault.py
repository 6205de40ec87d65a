"""A vault with three locks as an environment. Data: {"prompt", "first", "second", "third"}, three digits.

A lock shows a digit and opens for this digit plus 3, without the tens. The prompt shows the first lock; each of the
others is shown when the one before it is open. So no single answer opens the vault: what opens it is only said later.
"""

LOCKS = ("first", "second", "third")


class Vault:
    def __init__(self):
        self.extras = {}  # gets the columns of the row

    def init(self, prompt):
        """The messages of the first context: those of the data."""
        self.opened = 0
        return prompt, {}

    def step(self, text):
        """One try: a third for the right digit. A wrong one ends the game."""
        if text.strip() != str((int(self.extras[LOCKS[self.opened]]) + 3) % 10):
            return {"observations": [], "reward": 0.0, "done": True}
        self.opened += 1
        done = self.opened == len(LOCKS)
        shown = [] if done else [{"role": "user", "content": str(self.extras[LOCKS[self.opened]])}]
        return {"observations": shown, "reward": 1 / len(LOCKS), "done": done}
