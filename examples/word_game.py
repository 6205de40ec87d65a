"""A word-guessing game in the text form of environments. Data: {"prompt", "word"}.

The model writes a guess; the answer marks each letter: = in its place, + elsewhere in the word, . not in it.
"""

import re
from collections import Counter


class WordGame:
    def __init__(self):
        self.extras = {}  # gets the columns of the row

    def init(self, prompt):
        """The messages of the first context: those of the data."""
        self.word, self.best = str(self.extras["word"]).lower(), 0
        return prompt, {}

    def step(self, text):
        """One guess. Its reward is what it adds to the most letters in place so far, as a share of the word; so all
        rewards of a game together are at most 1."""
        guess = next(iter(re.findall(r"[a-z]+", text.lower())[-1:]), "")
        if len(guess) != len(self.word):
            return answer(f"Guess a word of {len(self.word)} letters.", 0.0)
        marks = marked(guess, self.word)
        gained = max(marks.count("=") - self.best, 0)
        self.best += gained
        return answer(f"{guess} {marks}", gained / len(self.word), done=guess == self.word)


def answer(text, reward, done=False):
    return {"observations": [{"role": "user", "content": text}], "reward": reward, "done": done}


def marked(guess: str, word: str) -> str:
    """A mark for each letter. A letter that the word has once is marked once."""
    left = Counter(w for g, w in zip(guess, word) if g != w)
    marks = ""
    for g, w in zip(guess, word):
        elsewhere = g != w and left[g] > 0
        left[g] -= elsewhere
        marks += "=" if g == w else "+" if elsewhere else "."
    return marks
