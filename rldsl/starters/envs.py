"""Environments: what the model talks with. A class is an environment, an object of it one conversation.

`reset` gets the columns of a row of data. Every other public method is a tool: its types and docstring are what the
model reads about it, as it reads what a tool returns or raises. `rlc` never imports this file; the run does.
"""

from typing import Any


class Calculator:
    """Two tools that compute, and one that hands in the result."""

    def reset(self, answer: float, **row: Any) -> str | None:
        """Begins a conversation. A string that it returns is appended to the prompt."""
        self.answer = float(answer)
        self.submitted: float | None = None
        return " Compute with the tools, then call submit."

    def add(self, a: float, b: float) -> float:
        """Adds two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a + b

    def multiply(self, a: float, b: float) -> float:
        """Multiplies two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a * b

    def submit(self, result: float) -> str:
        """Hands in the result. Only the first one counts.

        Args:
            result: The number that was asked for.
        """
        if self.submitted is None:
            self.submitted = float(result)
        return "Thank you."

    def get_reward(self) -> float:
        """The reward of the conversation, asked for when it has ended."""
        return float(self.submitted is not None and abs(self.submitted - self.answer) < 1e-6)
