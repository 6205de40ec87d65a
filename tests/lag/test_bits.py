"""With `invariant=training` a run with a lag has the same bits, parameters and metrics, under every placement."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.programs import Metrics, run_program
from tests.end_to_end.test_invariance import HERE, everywhere, placement
from tests.samples import thorough_between
from tests.tiny import make_model, make_sums, write_jsonl

PLACES = {
    # colocated
    "dp4": everywhere(4, "dp=4", "actor", "ref"),
    "pp2": everywhere(2, "pp=2", "actor", "ref"),
    "other layouts": placement(4, actor_generate="on mesh(0:4) dp=2 tp=2", actor_train="on mesh(0:4) dp=2 pp=2 zero=2",
                               ref_logprobs="on mesh(0:2) tp=2"),
    "everything divided": placement(4, actor_generate="on mesh(0:4) dp=4 keep=false", ref_logprobs="on mesh(0:1)",
                                    actor_train="on mesh(0:4) dp=4 zero=3 recompute=full"),
    # disjoint
    "rank 0 generates": placement(2, actor_generate="on mesh(0:1)", actor_train="on mesh(1:2)",
                                  ref_logprobs="on mesh(1:2)"),
    "rank 0 trains": placement(4, actor_generate="on mesh(2:4)", actor_train="on mesh(0:2) dp=2 zero=1",
                               ref_logprobs="on mesh(0:2) dp=2"),
    "three parts": placement(4, actor_generate="on mesh(0:1)", actor_train="on mesh(1:3) pp=2",
                             ref_logprobs="on mesh(3:4)"),
    "pipelines": placement(4, actor_generate="on mesh(0:2) pp=2", actor_train="on mesh(2:4) dp=2 zero=3",
                           ref_logprobs="on mesh(0:2) dp=2"),
}
Found = tuple[str, Metrics]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "m", tie_word_embeddings=True, num_hidden_layers=2)


def run(model: Path, folder: Path, lag: int, place: str) -> Found:
    """The digest of the parameters after the last step, and the metrics of each."""
    text = (HERE / "grpo_small.rlf").read_text().replace("seed=7)", f"seed=7, lag={lag})")
    text = text.replace("causal_lm(base) train", "causal_lm(base, invariant=training) train")
    text = text.replace("causal_lm(base)\n", "causal_lm(base, invariant=true)\n")
    (folder / "rewards_small.py").write_text((HERE / "rewards_small.py").read_text())
    write_jsonl(folder / "rows.jsonl", make_sums(32))
    (folder / "lagged.rlf").write_text(text.replace("  metric length", "  metric age = max(gen.version)\n  metric length"))
    steps = 2 + lag  # the last generates with what the first has trained
    sets = {"base": str(model), "rows": str(folder / "rows.jsonl"), "steps": steps, "batch": 3, "samples": 2,
            "tokens": 4, "every_step": steps}
    metrics = run_program(folder / "lagged.rlf", sets, folder, place)
    saved = {name: x for file in folder.rglob("*.safetensors") for name, x in load_file(file).items()}
    assert saved
    return sha256(b"".join(saved[n].view(torch.uint8).numpy().tobytes() for n in sorted(saved))).hexdigest(), metrics


@pytest.fixture(scope="module", params=[0, 1, 2])
def alone(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Found]:
    """A lag, and what comes of it on one rank."""
    place = everywhere(1, "dp=1", "actor", "ref")
    return request.param, run(model, tmp_path_factory.mktemp("alone"), request.param, place)


@pytest.mark.thorough
def test_staleness_is_the_lag(alone: tuple[int, Found]) -> None:
    lag, (_, metrics) = alone
    assert [line["age"] for line in metrics] == [lag] * (2 + lag)
    assert len({line["actor/loss"] for line in metrics}) == 2 + lag, "nothing is learned"


@pytest.mark.thorough
@pytest.mark.parametrize("name", thorough_between(PLACES))
def test_every_placement_gives_the_same_bits(name: str, alone: tuple[int, Found], model: Path, tmp_path: Path) -> None:
    lag, expected = alone
    assert run(model, tmp_path, lag, PLACES[name]) == expected
