"""A shard with an engine process: what it samples, which weights it has, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rldsl.backends.vllm import process
from rldsl.backends.vllm.process import EngineProcess, environment
from rldsl.backends.vllm.shared_weights import SharedWeights
from rldsl.diag import Failure
from rldsl.models.families import describe, sizes_of
from rldsl.plan.events import Sampling
from rldsl.plan.model import Model
from tests.backend_torch.shards import layout_of, pack, plan_model, shard_of
from tests.tiny import make_model
from tests.vllm.engines import BOTH, STANDIN, engine_of, use

EOS = 1  # of the tiny tokenizer
PROMPTS = [[5, 6, 7], [9], [5, 6, 7], [11, 12, 13, 14, 15], [8, 9], [20, 3, 4]]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("vllm") / "model", head_dim=32, tie_word_embeddings=True,
                          num_hidden_layers=2))


def model_of(path: str) -> Model:
    return replace(plan_model(path), sizes=sizes_of(describe(path, "causal_lm")))


@pytest.fixture(scope="module", params=BOTH)
def both(request: pytest.FixtureRequest, path: str) -> Iterator[tuple[Any, Any]]:
    """A shard with an engine, and one of the torch backend, of one model."""
    with pytest.MonkeyPatch.context() as patch:
        use(patch, request.param)
        model = model_of(path)
        found = shard_of(model, layout_of(backend="vllm"), 0), shard_of(model, layout_of(), 0)
        assert found[0] and found[1]
        yield found[0][0], found[1][0]
        found[0][0].close()  # type: ignore[attr-defined]


def rows(prompts: list[list[int]] = PROMPTS, first: int = 0) -> Any:
    return pack([(p, []) for p in prompts], first)


def made(shard: Any, prompts: Any = None, step: int = 1, slots: int = 0, **sampling: Any) -> Any:
    options = Sampling(max_new_tokens=8, **sampling)
    return shard.generate(rows() if prompts is None else prompts, options, seed=3, step=step, max_num_seqs=slots,
                          max_prompt_len=12)


def responses(output: Any) -> list[list[int]]:
    b = output.batch
    parts = b.tokens.split((b.prompt_lens + b.response_lens).tolist())
    return [part[n:].tolist() for part, n in zip(parts, b.prompt_lens.tolist(), strict=True)]


def test_logprobs_are_at_the_temperature_and_before_the_filters(both: tuple[Any, Any]) -> None:
    engine, plain = both
    for sampling in (dict(temperature=0.6, top_k=5, top_p=0.8, min_p=0.02), dict(temperature=1.7), dict(top_k=3)):
        found = made(engine, **sampling)
        expected = plain.infer([found.batch], "logprobs", sampling.get("temperature", 1.0))
        torch.testing.assert_close(found.logprobs, expected, rtol=0, atol=2e-5)
        if k := sampling.get("top_k"):
            likely, _ = plain.top([found.batch], int(k), 1.0)
            assert all(t in at for t, at in zip(sum(responses(found), []), likely.tolist(), strict=True))


def test_greedy_decoding_is_that_of_the_torch_backend(both: tuple[Any, Any]) -> None:
    engine, plain = both
    found, expected = made(engine, greedy=True), made(plain, greedy=True)
    assert responses(found) == responses(expected)
    assert found.finished.tolist() == expected.finished.tolist()
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=0, atol=2e-5)


def test_what_a_row_gets_depends_on_seed_step_and_row_alone(both: tuple[Any, Any]) -> None:
    engine, _ = both
    found = responses(made(engine))
    assert responses(made(engine)) == found
    assert found[0] != found[2], "two samples of one prompt have random numbers of their own"
    assert responses(made(engine, slots=2)) == found
    assert responses(made(engine, rows(PROMPTS[3:], 3))) == found[3:]
    assert responses(made(engine, step=2)) != found


def test_what_ends_a_response(both: tuple[Any, Any]) -> None:
    engine, plain = both
    usual = made(engine, rows(PROMPTS * 4), temperature=3.0)
    ended = [text[-1] == EOS for text in responses(usual)]
    assert usual.finished.tolist() == ended and any(ended) and not all(ended)
    assert all(len(text) == 8 or end for text, end in zip(responses(usual), ended, strict=True))
    long = made(engine, rows(PROMPTS * 4), temperature=3.0, min_new_tokens=8)
    assert all(len(text) == 8 and EOS not in text[:-1] for text in responses(long))
    from rldsl.backends.torch.generate.stop_conditions import tokenizer_of

    tokenizer, _ = tokenizer_of(engine.model.path)
    letter = tokenizer.decode([responses(usual)[0][1]])
    stopped = made(engine, rows(PROMPTS * 4), temperature=3.0, stop=(letter,))
    for text, before, finished in zip(responses(stopped), responses(usual), stopped.finished.tolist(), strict=True):
        assert text == before[:len(text)], "until the string, nothing changes"
        assert finished == (letter in tokenizer.decode(text) or text[-1] == EOS)
        assert letter not in tokenizer.decode(text[:-1])
    assert any(letter in tokenizer.decode(text) for text in responses(stopped))


def test_sequences_that_continue(both: tuple[Any, Any]) -> None:
    engine, plain = both
    begun = pack([([5, 6], [7, EOS]), ([5, 6], [7, 8])])
    found, expected = (shard.generate(begun, Sampling(max_new_tokens=4, greedy=True), seed=3, step=1, max_num_seqs=0,
                                      max_prompt_len=8, continues=True) for shard in both)
    assert responses(found) == responses(expected) and responses(found)[0] == []
    assert found.finished.tolist() == expected.finished.tolist()
    nothing = made(engine, rows([]))
    assert len(nothing.batch) == 0 and nothing.logprobs.numel() == 0


def test_an_empty_prompt(both: tuple[Any, Any]) -> None:
    with pytest.raises(Failure) as caught:
        made(both[0], rows([[], [3]]))
    assert caught.value.diagnostics[0].code == "RL0732"


def resident(pid: int) -> int:
    """Bytes of a process in memory that it shares with none."""
    return sum(int(size) * 1024 for size in re.findall(r"Private_\w+:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text()))


def test_weights_are_taken_anew_and_nothing_is_left_behind(both: tuple[Any, Any]) -> None:
    engine, plain = both
    made(engine)
    pid, size = engine.engine.process.pid, 0
    for i in range(20):
        for name, mine in engine.state_dict().items():
            change = 0.02 * torch.randn(mine.shape, generator=torch.Generator().manual_seed(i))
            mine.add_(change)
            plain.state_dict()[name].add_(change)
        found = made(engine, step=i)
        torch.testing.assert_close(found.logprobs, plain.infer([found.batch], "logprobs", 1.0), rtol=0, atol=5e-5)
        size = size or i >= 4 and resident(pid)
    assert engine.engine.process.pid == pid, "one engine, whatever its weights are"
    assert resident(pid) < size + 4 * 2**20


def test_memory_is_given_back_and_comes_again(both: tuple[Any, Any]) -> None:
    engine, _ = both
    before = made(engine)
    kept = {name: x.clone() for name, x in engine.state_dict().items()}
    engine.free()
    assert not engine.tensors and not any(x.any() for x in engine.shared.tensors.values())
    engine.allocate()
    for name, x in engine.state_dict().items():
        x.copy_(kept[name])
    engine.offload("parameters")
    engine.onload("parameters")()
    assert responses(made(engine)) == responses(before)


def test_longer_sequences_get_an_engine_with_room(both: tuple[Any, Any]) -> None:
    engine, _ = both
    pid, found = (made(engine), engine.engine.process.pid)[1], responses(made(engine))
    longer = engine.generate(rows([[5] * 40]), Sampling(max_new_tokens=4), seed=3, step=1, max_num_seqs=0,
                             max_prompt_len=40)
    assert len(responses(longer)[0]) <= 4 and engine.engine.process.pid != pid and not engine_of(pid)
    assert responses(made(engine)) == found


# ------------------------------------------------------------------------------------------------ what goes wrong


@pytest.fixture
def alone(path: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A shard whose engine has not begun."""
    use(monkeypatch, "standin")
    shard = shard_of(model_of(path), layout_of(backend="vllm"), 0)
    assert shard is not None
    yield shard[0]
    shard[0].close()  # type: ignore[attr-defined]


def failed(shard: Any) -> Any:
    with pytest.raises(Failure) as caught:
        made(shard)
    (diagnostic,) = caught.value.diagnostics
    return diagnostic


def test_an_engine_that_dies(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_DIE_AT", "5")
    d = failed(alone)
    assert (d.code, d.title) == ("RL0801", "the vLLM engine of `m` ended with exit status 3")
    assert d.notes[-1] == "the stand-in ends here" and "--resume" in d.help


def test_an_engine_that_is_killed(alone: Any) -> None:
    made(alone)
    os.kill(alone.engine.process.pid, signal.SIGKILL)
    d = failed(alone)
    assert d.code == "RL0801" and d.title.endswith("was ended by SIGKILL")


def test_a_model_that_vllm_refuses(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_REFUSE", "no kernel for this head size")
    d = failed(alone)
    assert d.code == "RL0801" and "could not load the model" in d.title
    assert d.notes == ("ValueError: no kernel for this head size",)


def test_weights_that_vllm_does_not_know(alone: Any) -> None:
    alone.shared = SharedWeights({"model.other.weight": ((2, 3), torch.float32)})
    alone.tensors = alone.shared.tensors
    d = failed(alone)
    assert d.code == "RL0801" and "could not take the weights" in d.title and "model.other.weight" in d.notes[0]


def test_weights_that_vllm_misses(alone: Any) -> None:
    shapes = {name: tuple(x.shape) for name, x in alone.tensors.items() if name != "model.norm.weight"}
    alone.shared = SharedWeights({name: (shape, torch.float32) for name, shape in shapes.items()})
    alone.tensors = alone.shared.tensors
    assert "got no weights: model.norm.weight" in failed(alone).notes[0]


@pytest.mark.parametrize("variables, note", [
    (dict(RLDSL_VLLM_PYTHON="/no/python"), "/no/python cannot be run: No such file or directory"),
    (dict(STANDIN_VERSION="0.9.2"), "vLLM 0.9.2 of"), (dict(PYTHONPATH=""), "vLLM cannot be imported by")])
def test_no_vllm_of_a_supported_version(alone: Any, variables: dict[str, str], note: str,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    d = failed(alone)
    assert d.code == "RL0326" and d.notes[0].startswith(note) and "RLDSL_VLLM_PYTHON" in d.help


def test_an_engine_that_never_answers(alone: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither at its start nor later: it is ended, and the run hears of it."""
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexec sleep 600\n")
    silent.chmod(0o755)
    monkeypatch.setattr(process, "START_LIMIT", 0.2)
    with monkeypatch.context() as only, pytest.raises(Failure) as raised:
        only.setenv("RLDSL_VLLM_PYTHON", str(silent))
        made(alone)
    (found,) = raised.value.diagnostics
    assert found.code == "RL0326" and "no progress for 0.2 s" in found.notes[1]
    monkeypatch.setattr(process, "START_LIMIT", 60.0)
    made(alone)
    monkeypatch.setattr(process, "SILENCE_LIMIT", 0.2)
    os.kill(alone.engine.process.pid, signal.SIGSTOP)
    found = failed(alone)
    assert found.code == "RL0801" and "could not generate" in found.title and "no progress" in found.notes[0]


TALKS = """
import importlib.util, os, sys, time
spec = importlib.util.spec_from_file_location("engine", sys.argv[1])
engine = importlib.util.module_from_spec(spec)
spec.loader.exec_module(engine)
requests, answers = os.fdopen(0, "rb"), os.fdopen(1, "wb")
while True:
    message, _ = engine.receive(requests)
    if message["verb"] == "generate":
        for _ in range(6):
            time.sleep(0.5)
            engine.send(answers, engine.PROGRESS)
    engine.send(answers, {"version": "0.32.0"})
"""


@pytest.mark.thorough
def test_an_engine_that_makes_progress_may_take_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "talks.py").write_text(TALKS)
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/talks.py" "$1"\n')
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setenv("RLDSL_VLLM_PYTHON", str(tmp_path / "python"))
    shared = SharedWeights({"w": ((2,), torch.float32)})
    talks = EngineProcess("m", shared.descriptor, "cpu")
    monkeypatch.setattr(process, "SILENCE_LIMIT", 2.0)
    answer, _ = talks.ask("generate")
    assert answer == {"version": "0.32.0"}
    talks.close()


def test_the_engine_sees_nothing_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x",
           "HOME": "/home/me", "CUDA_VISIBLE_DEVICES": "4,7", "VLLM_LOGGING_LEVEL": "INFO"}
    found = environment(own, "cuda:1")
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & found.keys()
    assert found["HOME"] == "/home/me" and found["CUDA_VISIBLE_DEVICES"] == "7" and found["VLLM_LOGGING_LEVEL"] == "INFO"
    assert environment({}, "cuda:1")["CUDA_VISIBLE_DEVICES"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in environment({}, "cpu")


def test_an_engine_ends_with_its_rank(path: str, tmp_path: Path) -> None:
    """Also if the rank is killed while the engine computes."""
    code = ("import os, sys; from rldsl.backends.vllm.process import EngineProcess\n"
            "e = EngineProcess('m', os.memfd_create('x'), 'cpu'); print(e.process.pid, flush=True); sys.stdin.read()")
    env = {**os.environ, "RLDSL_VLLM_PYTHON": sys.executable, "PYTHONPATH": f"{STANDIN}{os.pathsep}{ROOT}"}
    rank = subprocess.Popen([sys.executable, "-c", code], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert rank.stdin and rank.stdout
    pid = int(rank.stdout.readline())
    assert engine_of(pid)
    os.kill(pid, signal.SIGSTOP)  # it would not see the end of its input
    rank.kill()
    rank.wait()
    os.kill(pid, signal.SIGCONT)
    for _ in range(100):
        if not engine_of(pid):
            break
        time.sleep(0.1)
    assert not engine_of(pid)
    rank.stdin.close()
    rank.stdout.close()


def test_sleep_and_wake(path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a GPU: weights have memory before they are loaded, and the KV cache after."""
    use(monkeypatch, "standin")
    monkeypatch.setenv("STANDIN_LOG", str(tmp_path / "log"))
    shard = shard_of(model_of(path), layout_of(backend="vllm"), 0)
    assert shard is not None
    own, shared = shard[0], shard[0].shared  # type: ignore[attr-defined]
    process = EngineProcess("m", shared.descriptor, "cuda:0")
    process.ask("sleep", device="cuda")  # before there is anything
    process.ask("open", memory=shared.descriptor, bytes=shared.size, weights=shared.records(), model=path,
                dtype="float32", device="cuda", max_len=32, max_num_seqs=4, bytes_per_token=4096)
    process.ask("load")
    process.ask("sleep", device="cuda")
    process.ask("sleep", device="cuda")
    process.ask("load")
    process.ask("load")
    process.close()
    lines = [line.split(" ", 1)[1] for line in (tmp_path / "log").read_text().splitlines()]
    assert lines[1:] == ["load_tensors", "sleep", "wake weights", "load_tensors", "wake kv_cache", "load_tensors"]
    own.close()  # type: ignore[attr-defined]


def test_a_copy_is_never_another_ones(alone: Any) -> None:
    with pytest.raises(TypeError):
        alone.alias(replace)
