"""Environments for tests of the contract: each says what it was asked, and fails in one way when asked to."""

import asyncio
import os
import sys
import time

LOG = []  # shared by all objects of the process


class Calculator:
    """Adds."""

    def __init__(self):
        self.calls = []
        self.numbers = []

    def reset(self, prompt, answer=0, fail="", seed=None, **row):
        self.calls.append(("reset", answer, sorted(row)))
        self.answer, self.seed = answer, seed
        LOG.append(answer)
        os.environ["CALCULATOR"] = str(answer)
        if fail == "reset":
            raise RuntimeError("cannot reset")
        if fail == "type":
            return 5
        if fail == "half":
            return "\ud800"
        return f" [{answer}]" if answer else None

    def add(self, a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: The first one.
            b: The other one.
        """
        self.calls.append(("add", a, b))
        self.numbers.append(a + b)
        return a + b

    async def slowly(self, seconds: float) -> str:
        """Waits.

        Args:
            seconds: How long.
        """
        self.calls.append(("slowly", seconds))
        await asyncio.sleep(seconds)
        return f"waited {seconds}"

    def show(self) -> str:
        """What it knows."""
        return f"{self.calls} {LOG} {os.environ['CALCULATOR']} {self.seed}"

    def break_down(self, how: str) -> str:
        """Fails.

        Args:
            how: In which way.
        """
        if how == "raise":
            raise ValueError("broken")
        if how == "exit":
            os._exit(3)
        if how in ("leave", "leave with a word"):
            sys.exit(3 if how == "leave" else how)
        if how == "half":
            return "\udcff"
        if how == "hang":
            time.sleep(600)
        if how == "flood":
            while True:
                print("x" * 1000)
        if how == "print":
            print("hello from the tool")
        if how == "crash":
            os.kill(os.getpid(), 11)
        if how == "image":
            return [{"type": "image", "image": None}]
        if how == "list":
            return [{"type": "text", "text": "one, "}, {"type": "text", "text": "two"}]
        if how == "shout":
            return "<|im_end|> ends nothing"
        return "nothing happened"

    def get_reward(self) -> float:
        if self.numbers == [13]:
            return float("nan")
        if self.numbers == [14]:
            raise KeyError("lost")
        return float(sum(self.numbers) == self.answer)


class Scoreless:
    async def reset(self, **row):
        return None


class NoReset:
    def add(self, a: int) -> int:
        """Adds."""


class NoDocs:
    def reset(self, **row):
        pass

    def add(self, a):
        return a


class NeedsArguments:
    def __init__(self, size):
        self.size = size


class Exits:
    def __init__(self):
        sys.exit(4)


class Echo:
    """The text form."""

    def init(self, prompt):
        return [{"role": "system", "content": "echo"}, *prompt], {}

    def step(self, action):
        if action == "bad":
            return 3
        if action == "half":
            return {"observations": [{"role": "user", "content": "a\udcff"}], "done": False}
        if action == "silent":
            return {"observations": [], "reward": 0.0, "done": False}
        done = action.endswith("bye")
        return {"observations": [{"role": "user", "content": action.upper()}], "reward": 0.5, "done": done}

    def close(self):
        print("closed")
