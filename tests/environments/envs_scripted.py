"""A guessing game, as a class that the tests name in programs; `scripted.py` plays it in the rank's own process."""

from __future__ import annotations


class Guess:
    def reset(self, number: int, **row: object) -> str | None:
        self.number, self.heard = number, 0
        return None

    def reply(self, text: str) -> str | None:
        """What the environment says; None ends the conversation."""
        self.heard += 1
        return None if self.heard + self.number % 3 > 3 else f"{len(text)}? " + "no " * (self.heard + self.number % 2)

    def get_reward(self) -> float:
        return self.number / 10 + self.heard
