"""A third backend (`third/plain`), written as docs/backends.md says: nothing else knows its name."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rldsl import api
from rldsl.diag import Diagnostic, Failure
from rldsl.memory import curves
from rldsl.memory.call_memory import MemoryCosts
from rldsl.memory.curve import during, peak
from rldsl.passes import pipeline
from rldsl.passes.emit import emit
from rldsl.placement.model import PlacedGraph
from rldsl.placement.place import place_graph
from rldsl.plan import backends
from rldsl.plan.events import Train
from rldsl.plan.model import Plan
from rldsl.plan.projection import event_paths
from rldsl.search import Options, find_placement, memory_check
from rldsl.simulate import simulate
from rldsl.simulate.stage import StagePasses
from rldsl.simulate.time_costs import TimeCosts
from rldsl.verify import verify
from rldsl.verify.issue_order import IssueOrder
from tests.end_to_end.test_invariance import placement
from tests.megatron import programs
from tests.megatron.programs import GRPO, alike, compiled, results
from tests.search import programs as sized
from tests.tiny import make_all, make_model

HERE = Path(__file__).parent / "third"
ROOT = HERE.parents[2]


@pytest.fixture(autouse=True)
def third() -> Iterator[None]:
    """As if it were installed beside the others."""
    import rldsl.backends

    rldsl.backends.__path__.append(str(HERE))
    backends.described.cache_clear()
    yield
    rldsl.backends.__path__.remove(str(HERE))
    backends.described.cache_clear()


def execute(rank: int, *given: Any) -> Any:
    import rldsl.backends

    rldsl.backends.__path__.append(str(HERE))
    return programs.execute(rank, *given)


def test_it_is_short() -> None:
    lines = {p.name: len(p.read_text().splitlines()) for p in HERE.rglob("*.py")}
    assert lines["__init__.py"] + lines["describe.py"] < 140 and lines["costs.py"] < 80
    assert "plain" in backends.names()


def test_it_has_what_the_protocol_asks_for() -> None:
    """But for the calls that its description leaves out."""
    from rldsl.backends.plain import Plain, build
    from rldsl.runtime.backend import Shard

    asked = {name for name in vars(Shard) if not name.startswith("_")}
    assert asked - set(vars(Plain)) == {"generate", "converse", "top"} and callable(build)


@pytest.mark.thorough
def test_it_trains_as_the_others_do(tmp_path: Path) -> None:
    tiny = make_all(tmp_path / "tiny", tie_word_embeddings=True, num_hidden_layers=2)
    sets = {"base": str(tiny / "models/sft"), "rows": str(tiny / "data/prompts.jsonl")}
    mesh = "on mesh(0:2)"
    plans = [compiled(GRPO, sets, placement(2, **{"actor_*": f"{mesh} tp=2", "ref_*": f"{mesh} dp=2"}), tmp_path),
             compiled(GRPO, sets, placement(2, actor_generate=f"{mesh} tp=2", actor_train=f"{mesh} dp=2 backend=plain",
                                            **{"ref_*": f"{mesh} dp=2 backend=plain"}), tmp_path)]
    (usual, drawn), (plain, sampled) = results(plans, tmp_path, 2, execute)
    alike(plain, usual)
    assert drawn and sampled == drawn


def refused(folder: Path, model: str, call: str) -> Any:
    (folder / "p.rlf").write_text(f'data rows = jsonl("prompts.jsonl", batch=4)\n{model}\nflow run(steps=1) {{\n'
                                  f"  p = rows.next()\n  {call}\n  metric x = mean(x)\n}}\n")
    with pytest.raises(Failure) as caught:
        api.compile(str(folder / "p.rlf"), {}, None)
    (d,) = caught.value.diagnostics
    return d.code, d.label


@pytest.mark.parametrize("model, call, words", [
    ('model m = causal_lm("PATH")', "g = m.generate(p) on mesh(0:2) dp=2 backend=plain\n  x = g.logprobs",
     "it does not support `generate`"),
    ('model m = causal_lm("PATH")',
     "g = m.generate(p) on mesh(0:2) dp=2\n  x = m.logprobs(g) on mesh(0:2) tp=2 backend=plain", "it does not support `tp`"),
    ('model m = causal_lm("PATH")\nmodel j = reward_model("RM")',
     "g = m.generate(p)\n  x = j.score(g) on mesh(0:2) dp=2 backend=plain", "the head of a reward_model")])
def test_what_it_cannot_do_is_refused(model: str, call: str, words: str, tmp_path: Path) -> None:
    text = model.replace("PATH", str(make_model(tmp_path / "m")))
    if "RM" in text:
        text = text.replace("RM", str(make_model(tmp_path / "rm", head="reward_model")))
    code, label = refused(tmp_path, text, call)
    assert code == "RL0327" and words in label


@pytest.mark.parametrize("name", ["torch", "megatron"])
def test_descriptions_are_light(name: str) -> None:
    """What the compiler imports of a backend imports neither torch nor the library behind it."""
    code = (f"import sys; from rldsl.plan.backends import described; assert described({name!r}) is not None; "
            "print(sorted({m.partition('.')[0] for m in sys.modules} & {'torch', 'megatron', 'transformers'}))")
    made = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "[]"


def test_no_backend_is_known_by_name() -> None:
    """Nothing asks which backend it is; the usual one is named once."""
    asking = re.compile(r"""\bmegatron\b|\bbackend\b\s*(?:[!=]=|\bin\b)\s*["'(\[]|=\s*"torch"$""")
    found = [f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
             for file in sorted((ROOT / "rldsl").rglob("*.py")) if file.name != "extras.py"  # names of packages
             for number, line in enumerate(file.read_text().splitlines(), 1)
             if asking.search(line.partition("  # ")[0])]
    assert [x.partition(": ")[2] for x in found] == ['DEFAULT_BACKEND = "torch"  # of a layout that names none'], found


# --------------------------------------------------------------------------------------------------- costs of its own


def placed(backend: str, memory_gb: float = 1000.0) -> PlacedGraph:
    """GRPO of a 0.5B model on two ranks; what the third backend can run is on `backend`."""
    rules = (f"place ref.logprobs on mesh(0:2) dp=2 backend={backend}\n"
             f"place actor.train on mesh(0:2) dp=2 mbs=4 backend={backend}\n"
             "place actor.generate on mesh(0:2) dp=2\nplace judge.score on mesh(0:2) dp=2\n")
    head = sized.HEAD.replace("gpus=1", f"gpus=2 memory_gb={memory_gb}")
    return place_graph(sized.graph("grpo", rules + sized.GRPO.replace(sized.HEAD, head), batch=16), "", sized.describe("0.5B"))


def planned(x: PlacedGraph) -> Plan:
    return emit(pipeline.run(x), "")


def bytes_of(plan: Plan) -> int:
    return max(peak(c).bytes for c in curves(plan))


def test_the_memory_check_asks_the_backend() -> None:
    """A device that holds the torch backend's calls, and not the logits of whole sequences."""
    torch, plain = planned(placed("torch")), planned(placed("plain"))
    assert bytes_of(plain) > bytes_of(torch)
    train = next(e for e, _ in event_paths(plain) if isinstance(e, Train))
    tokens, vocab = 4 * (256 + 512), next(m for m in plain.models if m.name == "actor").sizes.vocab
    assert dict(during(curves(plain)[0], train.id))["logits of actor.train"] == 16 * tokens * vocab
    between = (bytes_of(torch) + bytes_of(plain)) / 2e9
    memory_check.check_memory(x := placed("torch", between), curves(planned(x)))
    with pytest.raises(Failure) as caught:
        memory_check.check_memory(y := placed("plain", between), curves(planned(y)))
    (d,) = caught.value.diagnostics
    assert d.code == "RL0401" and any(note.startswith("logits of actor.train") for note in d.notes)
    assert "--on" in d.help and "backend" not in d.help  # micro-batches, on the same backend


def test_the_simulator_asks_the_backend() -> None:
    machines = sized.cluster(1, 2)
    found = {}
    for backend in ("torch", "plain"):
        plan = planned(placed(backend))
        seconds, calls = simulate(plan, machines).event_seconds(), {e.id: e for e, _ in event_paths(plan)}
        found[backend] = {getattr(calls[i], "output_name", type(calls[i]).__name__): s for i, s in seconds.items()
                          if hasattr(calls[i], "model") and hasattr(calls[i], "layout")}
    for call in ("Train", "logprobs"):
        assert found["plain"][call] > 1.5 * found["torch"][call], call  # one sequence after another, all logits
    assert found["plain"]["Generate"] == pytest.approx(found["torch"]["Generate"])


def test_the_search_asks_the_backend() -> None:
    """Its entries have the backend's seconds and bytes, and only divisions that it has."""
    machines, rule = sized.cluster(1, 4), "place actor.train backend={}\n"
    answers = {}
    for backend in ("torch", "plain"):
        p = sized.ready("grpo", "0.5B", machines, text=rule.format(backend) + sized.GRPO, batch=64)
        answers[backend] = find_placement(p, machines, int(80e9), Options("search", max_nodes=40))
    table = answers["plain"].evaluator.table
    job = next(j for j in answers["plain"].problem.calls if j.kind == "train")
    plain = table.candidates(job, 4)
    assert plain and {(e.strategy.backend, e.strategy.tp, e.strategy.pp, e.strategy.zero) for e in plain} == {("plain", 1, 1, 0)}
    torch = next(e for e in answers["torch"].evaluator.table.candidates(job, 4) if e.strategy.dp == 4)
    assert plain[0].seconds > torch.seconds
    best = answers["plain"].best[0]
    train = next(e for e, _ in event_paths(best.plan) if isinstance(e, Train))
    assert next(x for x in best.plan.layouts if x.id == train.layout).backend == "plain"
    assert best.seconds > answers["torch"].best[0].seconds


def stated(monkeypatch: pytest.MonkeyPatch, **said: object) -> None:
    """The third backend with another description."""
    from rldsl.backends.plain import describe

    monkeypatch.setattr(describe, "DESCRIPTION", replace(describe.DESCRIPTION, **said))
    backends.described.cache_clear()


def only(act: Callable[[], object]) -> Diagnostic:
    with pytest.raises(Failure) as caught:
        act()
    (d,) = caught.value.diagnostics
    return d


@pytest.mark.parametrize("said, words", [
    ({"calls": ("infer", "guess")}, "`calls` names 'guess'"), ({"divisions": ("dp", "xp")}, "`divisions` names 'xp'"),
    ({"zero": 4}, "`zero` is 4"), ({"memory": "torch"}, "derived from `rldsl.memory.call_memory.MemoryCosts`, not 'torch'"),
    ({"memory": MemoryCosts}, "`memory` must be an object")])
def test_a_description_that_is_wrong_is_refused(said: dict[str, object], words: str,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    stated(monkeypatch, **said)
    d = only(lambda: bytes_of(planned(placed("plain"))))
    assert (d.code, d.place) == ("RL0326", "rldsl.backends.plain.describe") and words in d.notes[0]
    assert "backend=torch" in d.help


def test_a_backend_without_a_description_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from rldsl.backends.plain import describe

    monkeypatch.delattr(describe, "DESCRIPTION")
    backends.described.cache_clear()
    d = only(lambda: placed("plain"))
    assert d.code == "RL0326" and "exports no `DESCRIPTION`" in d.notes[0]


def memory_that(**methods: Callable[..., object]) -> MemoryCosts:
    return type("Wrong", (MemoryCosts,), methods)()


@pytest.mark.parametrize("costs, words", [
    (memory_that(train=lambda *_: {"logits": -1}), "`memory.train['logits']`"),
    (memory_that(train=lambda *_: {"logits": 1.5}), "`memory.train['logits']`"),
    (memory_that(train=lambda *_: [("logits", 1)]), "`memory.train` must return holder -> bytes"),
    (memory_that(train=lambda *_: {1: 1}), "`memory.train` must return holder -> bytes"),
    (memory_that(gradient_bytes=lambda *_: None), "`memory.gradient_bytes`"),
    (memory_that(optimizer_bytes=lambda *_: True), "`memory.optimizer_bytes`")])
def test_bytes_that_are_nonsense_are_refused(costs: MemoryCosts, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stated(monkeypatch, memory=costs)
    d = only(lambda: bytes_of(planned(placed("plain"))))
    assert d.code == "RL0326" and words in d.notes[0]


@pytest.mark.parametrize("method, made, words", [
    ("train", StagePasses(-1, (), 0.0), "0 or more micro-batches"), ("train", None, "must return a `StagePasses`"),
    ("train", StagePasses(1, ((1.0, float("nan")),), 0.0), "finite (forward, backward)"),
    ("train", StagePasses(1, ((1.0, 1.0), (1.0, 1.0)), 0.0), "each of 1 chunks"),
    ("infer", StagePasses(2, (), 0.0), "finite (forward, backward)"), ("infer", StagePasses(2, ((1.0, 0.0),), -1.0), "bytes"),
    ("update", [1.0], "must return a list of ops")])
def test_seconds_that_are_nonsense_are_refused(method: str, made: object, words: str,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    stated(monkeypatch, time=type("Wrong", (TimeCosts,), {method: lambda *_: made})())
    d = only(lambda: simulate(planned(placed("plain")), sized.cluster(1, 2)))
    assert d.code == "RL0326" and words in d.notes[0]


def test_the_verifier_asks_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = api.finish(pipeline.run(placed("plain"))).plan
    verify(plan)

    class Crossed(IssueOrder):
        """Ranks use two communicators in different orders."""

        def train(self, x: Any, at: Any, count: int) -> Any:
            from rldsl.verify.issue_order import CommOp

            both = [CommOp("dp", at.pp, 0), CommOp("mesh", 0, 0)]
            return iter(both if at.dp else both[::-1])

    stated(monkeypatch, issue_order=Crossed())
    d = only(lambda: verify(plan))
    assert d.code == "RL0537" and "wait for each other" in d.title
