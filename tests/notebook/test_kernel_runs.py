"""Training from the cells of a real kernel: what errors name, environments, and Ctrl-C with what continues the run."""

from __future__ import annotations

import os
import re
import signal
import string
import threading
import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

from tests.tiny import CHAT_TEMPLATE, make_model, make_sums, write_jsonl

pytestmark = pytest.mark.thorough  # each takes part in one long session

PROGRAM = '''use std.grpo (group_norm, grpo_free)
use py "rewards.py" (exact: gen -> seq)
data prompts = jsonl("prompts.jsonl", batch=2, max_prompt_tokens=8)
model actor = causal_lm("model") train adamw(lr=1e-3)
flow small(steps=100000, seed=3) {
  prompt = prompts.next()
  gen = actor.generate(prompt, n=2, max_new_tokens=4)
  reward = exact(gen)
  actor.train(gen, loss=grpo_free(old=gen.logprobs, adv=group_norm(reward)))
  metric reward = mean(reward)
  checkpoint every 1
}
'''
GAMES = '''use std.grpo (group_norm, grpo_free)
use py "game.py" (Game: env)
data prompts = jsonl("prompts.jsonl", batch=2, max_prompt_tokens=64)
model actor = causal_lm("chat") train adamw(lr=1e-3)
flow games(steps=1, seed=3) {
  prompt = prompts.next()
  gen = actor.generate(prompt, env=Game, n=2, max_turns=2, max_new_tokens=4, max_tokens=512)
  actor.train(gen, loss=grpo_free(old=gen.logprobs, adv=group_norm(gen.reward)))
  metric reward = mean(gen.reward)
}
'''
CELLS = {
    "load": "import rldsl",
    "helper": "def same(row):\n    return row['completion'] == row['answr']",
    "reward": "\ndef exact(rows):\n    return [float(same(row)) for row in rows]",
    "fails": "rldsl.train('small.rlf', rewards={'exact': exact}, out='fails', quiet=True)",
    "one": "def exact(rows):\n    return 'one'",
    "returns": "rldsl.train('small.rlf', rewards={'exact': exact}, out='returns', quiet=True)",
    "right": "def exact(rows):\n    return [float(len(row['completion'])) for row in rows]",
    "stopped": "rldsl.train('small.rlf', rewards={'exact': exact}, out='run', quiet=True)",
    "again": "rldsl.train('small.rlf', rewards={'exact': exact}, out='run', quiet=True)",
    "rest": "seen = []\nrun = rldsl.Run('run').plan.run(out='run', resume=True, quiet=True, callbacks=[\n"
            "    lambda step: seen.append(step['step']) or len(seen) == 2])",
    "steps": "seen[:2], run.state",
    "game": "class Game:\n    def init(self, prompt):\n        self.turns = 0\n        return prompt, {}\n\n"
            "    def step(self, text):\n        self.turns += 1\n"
            "        said = [{'role': 'user', 'content': 'no'}]\n"
            "        return {'observations': said, 'reward': 1.0, 'done': self.turns == 2}",
    "played": "rldsl.train('games.rlf', rewards={'Game': Game}, out='games', quiet=True).metrics['reward'].tolist()",
    "broken": "class Game:\n    def init(self, prompt):\n        return prompt, {}\n\n"
              "    def step(self, text):\n        return {'reward': text.number}",
    "breaks": "rldsl.train('games.rlf', rewards={'Game': Game}, out='breaks', quiet=True)",
}


def steps(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[NotebookNode]]:
    """Cell -> what it holds once all have run. The kernel is interrupted, as Jupyter's button does it, once the run of
    "stopped" has made two steps."""
    folder = tmp_path_factory.mktemp("kernel")
    make_model(folder / "model", num_hidden_layers=1)
    make_model(folder / "chat", num_hidden_layers=1, characters=string.printable, chat=CHAT_TEMPLATE)
    write_jsonl(folder / "prompts.jsonl", make_sums(16))
    (folder / "small.rlf").write_text(PROGRAM)
    (folder / "games.rlf").write_text(GAMES)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
            patch.setenv(name, str(folder / name.lower()))
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in CELLS.values()])
        client = NotebookClient(book, timeout=300, allow_errors=True, kernel_name="python3",
                                resources={"metadata": {"path": str(folder)}})

        def interrupt() -> None:
            end = time.monotonic() + 280
            while steps(folder / "run") < 2 and time.monotonic() < end:
                time.sleep(0.05)
            os.killpg(client.km.provisioner.pgid, signal.SIGINT)

        thread = threading.Thread(target=interrupt, daemon=True)
        thread.start()
        client.execute()
        thread.join()
    return {name: [x for x in cell.outputs if x.output_type != "stream"]
            for name, cell in zip(CELLS, book.cells, strict=True)}


def error_of(cell: list[NotebookNode]) -> tuple[str, str]:
    """Its type, and what is shown."""
    (error,) = cell
    assert error.output_type == "error", error
    return error.ename, "\n".join(error.traceback)


@pytest.mark.parametrize("cell, code, place", [
    ("fails", "RL0775", "Cell In[2], line 2"),  # the innermost line: of a function that the reward uses
    ("returns", "RL0776", "Cell In[5]"), ("breaks", "RL0714", "Cell In[14], line 6")])
def test_errors_name_the_cell(found: dict[str, list[NotebookNode]], cell: str, code: str, place: str) -> None:
    name, shown = error_of(found[cell])
    assert name == "RunError" and f"error[{code}]" in shown and f"--> {place}\n" in shown, shown
    assert "functions/" not in shown and "Traceback" not in shown


def test_ctrl_c_stops_a_run_which_is_kept_and_continues(found: dict[str, list[NotebookNode]]) -> None:
    name, shown = error_of(found["stopped"])
    assert name == "RunInterrupted" and re.fullmatch(
        r'interrupted in step \d+ of 100000; to resume after step \d+: the same call with out="run", resume=True', shown)
    name, shown = error_of(found["again"])
    assert name == "DiagnosticError" and "RL0781" in shown and "`resume=True`" in shown
    assert found["rest"] == []
    seen, state = eval(found["steps"][0].data["text/plain"])
    assert state == "stopped" and seen[1] == seen[0] + 1 and seen[0] > 2


def test_an_environment_of_a_cell(found: dict[str, list[NotebookNode]]) -> None:
    assert found["played"][0].data["text/plain"] == "[2.0]"
