"""`examples/sweep.py`: trials are runs, and a callback ends a bad one. Optuna itself is replaced by a stand-in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forked import command
from tests.tiny import make_model, make_sums, write_jsonl

ROOT = Path(__file__).parents[2]
STEPS = 60  # so many that a run is stopped long before it ends
# what the example asks of Optuna; the trial with the small learning rate is to be pruned after step 4
OPTUNA = '''
from types import SimpleNamespace

class TrialPruned(Exception):
    pass

class Trial:
    def __init__(self, number):
        self.number, self.reported, self.params = number, {}, {}

    def suggest_float(self, name, low, high, log=False):
        assert low < high
        self.params[name] = [1e-3, 1e-5][self.number] if name == "lr" else 0.01
        return self.params[name]

    def report(self, value, step):
        self.reported[step] = value

    def should_prune(self):
        return self.number == 1 and 4 in self.reported

class Study:
    def optimize(self, objective, n_trials):
        self.trials = [Trial(i) for i in range(n_trials)]
        self.values = []
        for trial in self.trials:
            try:
                self.values.append(objective(trial))
            except TrialPruned:
                self.values.append(None)

    best_value, best_params = 0.0, {}

samplers = SimpleNamespace(TPESampler=lambda seed: seed)
pruners = SimpleNamespace(MedianPruner=lambda **_: None)
create_study = lambda **_: Study()
'''
SCRIPT = '''
import json, sys
sys.path.insert(0, ".")
import rldsl, sweep

study = sweep.main("model", "prompts.jsonl", 2)
print("FOUND " + json.dumps({
    "values": study.values, "reported": [trial.reported for trial in study.trials],
    "runs": {run.folder.name: [run.state, run.step, [m["reward"] for m in run.lines], run.plan.params["lr"]]
             for run in rldsl.runs("runs/sweep")}}))
'''


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("sweep")
    make_model(folder / "model", num_hidden_layers=1)
    write_jsonl(folder / "prompts.jsonl", make_sums(16))
    (folder / "optuna.py").write_text(OPTUNA)
    text = (ROOT / "examples/sweep.py").read_text()
    assert "steps=10" in text
    (folder / "sweep.py").write_text(text.replace("steps=10", f"steps={STEPS}"))
    (folder / "script.py").write_text(SCRIPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("RLDSL_CACHE", str(folder / "cache"))
        done = command("script.py", env={"PYTHONPATH": str(folder)})
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.partition("FOUND ")[2])


@pytest.mark.thorough
def test_a_trial_that_ends(found: dict) -> None:
    state, step, rewards, lr = found["runs"]["trial-0"]
    assert (state, step, lr) == ("finished", STEPS, 1e-3)
    assert found["values"][0] == pytest.approx(sum(rewards[-3:]) / 3)
    assert list(found["reported"][0].values()) == rewards, "the trial gets the numbers of the run, in order"


def test_a_trial_that_is_pruned(found: dict) -> None:
    state, step, rewards, lr = found["runs"]["trial-1"]
    assert state == "stopped" and 4 <= step < STEPS and lr == 1e-5 and found["values"][1] is None
    assert list(found["reported"][1].values()) == rewards, "the steps that end before the run stops are reported, too"
