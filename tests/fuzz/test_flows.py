"""A few random flows, always the same, and what `python -m tests.fuzz.flows` has found."""

from __future__ import annotations

from pathlib import Path

import pytest

from rldsl import api
from tests.fuzz.flows import HEAD, HERE, STEPS, Tried, compiled, flow, run
from tests.papers.programs import root

FIRST = 7_000  # numbers that the long runs do not reach
SAMPLED = "prompt = prompts.next()\ngen = actor.generate(prompt, n=2, max_new_tokens=4)\n"
COLLECTED = f"repeat {{\n{SAMPLED}kept = gen where parity(gen) > 0\n}} until count(kept) >= 3 max 2\n"
TRAINED = "actor.train(gen, loss=nll())\n"
FOUND = {
    "text of a selection": f"""{SAMPLED}kept = gen where parity(gen) > 0
        verdict = wise.generate(ask(kept), max_new_tokens=2)
        some = wise.generate(ask_some(kept), max_new_tokens=2)
        metric m = mean(parity(verdict)) + mean(mean(parity(some) by prompt) * parity(kept))""",
    "chains of a selection of continuations": f"""{SAMPLED}more = actor.generate(gen, n=2, max_new_tokens=3)
        full = whole(more where parity(more) > 0)
        actor.train(full, loss=pg(adv=full.logprobs))""",
    "others of collected rows": f"""{COLLECTED}rival = others(kept)
        verdict = wise.generate(ask(rival), max_new_tokens=2)
        metric m = mean(parity(verdict))""",
    "text and chains of collected rows": f"""{COLLECTED}more = actor.generate(gen, max_new_tokens=2)
        full = whole(more)
        verdict = wise.generate(ask(gen), max_new_tokens=2)
        metric m = mean(full.logprobs) + mean(parity(verdict))""",
    "text about a pick from a selection": f"""{SAMPLED}kept = gen where parity(gen) > 0
        best = pick(kept, spread(gen))
        verdict = wise.generate(ask(best), n=2, max_new_tokens=2)
        metric m = mean(parity(verdict))""",
    "numbers of prompts in a buffer": f"""{SAMPLED}some = prompt with x=mean(parity(gen) by prompt)
        every 2 {{ bad.add(some) }}
        old = bad.sample(3, weight=1 + bad.x)
        metric m = mean(old.x)""",
    "conditions at a neighbor": f"""{SAMPLED}a = at_end(gen.finished)
        b = next(gen.finished by prompt)
        c = last(gen.finished by prompt)
        d = at_end(gen.finished by prompt)
        e = next(gen.logprobs > -3)
        kept = gen where b
        metric m = mean(a) + mean(c) + mean(d) + mean(e) + count(kept)""",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return root(tmp_path_factory.mktemp("flows"))


@pytest.mark.thorough
@pytest.mark.many
def test_flows_run_as_on_one_rank(base: Path) -> None:
    tried = run(base, range(FIRST, FIRST + 5))
    assert not tried.wrong and len(tried.equal) >= 4, tried


@pytest.mark.thorough
@pytest.mark.many
@pytest.mark.parametrize("lag", [1, 2])
def test_with_a_lag_they_do_too(lag: int, base: Path) -> None:
    tried = run(base, range(FIRST + 100 * lag, FIRST + 100 * lag + 3), lag)
    assert not tried.wrong and len(tried.equal) >= 2, tried


@pytest.mark.parametrize("name", FOUND)
def test_what_was_refused_compiles(base: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one rank and placed, by the verifier and the simulator."""
    body = FOUND[name] + "\n" + TRAINED + "critic.train(gen, loss=near(aim=len(gen)))\n"
    monkeypatch.setattr("tests.fuzz.flows.flow", lambda seed, lag: f"{HEAD}flow f(steps={STEPS}) {{\n{body}}}\n")
    tried = Tried()
    assert compiled(base, [*FOUND].index(name), tried) and not tried.wrong and not tried.refused


@pytest.mark.thorough
def test_flows_have_what_makes_sequences_of_sequences() -> None:
    """And whatever they have, the checker accepts."""
    texts = [flow(seed).removeprefix(HEAD) for seed in range(FIRST, FIRST + 12)]
    whole = "".join(texts)
    words = "concat( pick( others( prefixes( whole( .sample( .add( ask( where with repeat".split()
    assert all(word in whole for word in words), [word for word in words if word not in whole]
    assert not any(api.check(HEAD + text, str(HERE / "flow.rlf")) for text in texts) and flow.__wrapped__(FIRST) == HEAD + texts[0]
