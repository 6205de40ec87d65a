"""The program of an engine process: vLLM, which one rank drives over standard input and output.

It runs in vLLM's environment, which need not have rldsl, so it imports nothing of it; the rank imports `send` and
`receive` from here. A message is JSON with arrays of numbers after it: nothing is pickled. Weights are not in messages:
they lie in memory that both processes map. Whatever vLLM prints goes to standard error.
In: "hello", "open", "load", "generate", "converse", "turns", "sleep". Out: one answer each; {"error": ...} where it
failed.
Invariants: it has its own world, of one process; what is sampled for a row depends only on the weights and the
message; it ends when its rank ends.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import sys
import threading
import time
import traceback
from array import array
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import accumulate
from math import prod
from typing import IO, Any

Arrays = Mapping[str, "array[Any]"]
Message = Mapping[str, Any]
LENGTH = struct.Struct("<Q")
BLOCK = 128  # tokens: no block of a KV cache is larger
POLL = 0.5  # seconds between looks whether the rank is still there
PROGRESS: dict[str, Any] = {"progress": True}  # not an answer: that there will be one
PROGRESS_EVERY = 10.0  # seconds


def send(stream: IO[bytes], message: Message, arrays: Arrays | None = None) -> None:
    """Write a message. arrays: of type "q" (int64) or "f" (float32), by name."""
    arrays = arrays or {}
    head = json.dumps({**message, "arrays": [[name, x.typecode, len(x)] for name, x in arrays.items()]}).encode()
    stream.write(LENGTH.pack(len(head)) + head)
    for x in arrays.values():
        stream.write(x.tobytes())
    stream.flush()


def receive(stream: IO[bytes]) -> tuple[dict[str, Any], dict[str, array[Any]]]:
    """Read a message. Errors: EOFError where the other side is gone."""
    (length,) = LENGTH.unpack(_exactly(stream, LENGTH.size))
    message: dict[str, Any] = json.loads(_exactly(stream, length))
    arrays: dict[str, array[Any]] = {}
    for name, code, count in message.pop("arrays"):
        arrays[name] = array(code)
        arrays[name].frombytes(_exactly(stream, count * arrays[name].itemsize))
    return message, arrays


def _exactly(stream: IO[bytes], count: int) -> bytes:
    parts: list[bytes] = []
    while count:
        part = stream.read(count)  # of an unbuffered stream perhaps less
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


class WorkerExtension:
    """What vLLM's worker gets besides its own methods (`worker_extension_cls`)."""

    model_runner: Any  # of the worker

    def load_tensors(self, tensors: Mapping[str, Any]) -> None:
        """Replace all weights. tensors: by their names in the model's directory."""
        model = self.model_runner.get_model()
        wanted, loaded = {name for name, _ in model.named_parameters()}, set[str]()
        load_weights = model.load_weights

        def noted(weights: Any) -> Any:
            found = load_weights(weights)
            loaded.update(found or wanted)
            return found

        model.load_weights = noted
        try:
            self.model_runner.reload_weights(weights_iterator=iter(tensors.items()))
        finally:
            del model.load_weights
        if missing := sorted(wanted - loaded):
            raise ValueError(f"vLLM has parameters that got no weights: {', '.join(missing[:3])}")
        pack_shared_weights(model)

    def divide_logits(self, temperature: float) -> None:
        """Let logits be those at a temperature, before anything else is done with them: then the log-probs that vLLM
        reports before its filters are those at the temperature, and before its filters."""
        model = self.model_runner.get_model()
        if "compute_logits" in vars(model):
            del model.compute_logits
        if temperature != 1:
            plain = model.compute_logits

            def divided(*args: Any, **named: Any) -> Any:
                logits = plain(*args, **named)
                return None if logits is None else logits / temperature

            model.compute_logits = divided


def pack_shared_weights(model: Any) -> None:
    """On a CPU, linear layers multiply with packed copies of their weights. vLLM 0.32 makes the copy of a layer whose
    own weights it loads, so a head that shares the weight of the embedding would keep the one before."""
    packed = [m for m in model.modules() if hasattr(m, "cpu_linear") and m.weight.numel()]
    places = [m.weight.data_ptr() for m in packed]
    for module, place in zip(packed, places, strict=True):
        if places.count(place) > 1:
            module.quant_method.process_weights_after_loading(module)


class Engine:
    """vLLM with one model."""

    def __init__(self) -> None:
        self.llm: Any = None
        self.weights: dict[str, Any] = {}  # parameter name -> tensor in the shared memory
        self.sleeps = False  # whether its memory was given back
        self.running = set[int]()  # rows whose responses are under way
        self.report_progress: Callable[[], None] = lambda: None  # called between decode steps

    def hello(self, message: Message, arrays: Arrays) -> tuple[Message, Arrays]:
        import vllm

        return {"version": vllm.__version__}, {}

    def open(self, message: Message, arrays: Arrays) -> tuple[Message, Arrays]:
        """Make the engine; its weights are not those of the model yet.

        message: "memory", "bytes": the descriptor of the shared memory, and its size; "weights": [name, dtype, shape,
        offset] of each parameter in it; "model": its directory; "dtype"; "device"; "max_len": tokens of a sequence;
        "max_num_seqs"; "bytes_per_token": of the KV cache."""
        import torch
        import vllm

        memory = mmap.mmap(message["memory"], message["bytes"])
        for name, dtype, shape, offset in message["weights"]:
            self.weights[name] = torch.frombuffer(memory, dtype=getattr(torch, dtype), count=prod(shape),
                                                  offset=offset).view(shape)
        blocks = message["max_num_seqs"] * (-(-message["max_len"] // BLOCK) + 1) + 1
        on_cpu = message["device"] == "cpu"
        self.llm = vllm.LLM(
            model=message["model"], dtype=message["dtype"], load_format="dummy", seed=0, trust_remote_code=False,
            generation_config="vllm", max_model_len=message["max_len"], max_num_seqs=message["max_num_seqs"],
            kv_cache_memory_bytes=blocks * BLOCK * message["bytes_per_token"], enforce_eager=on_cpu,
            enable_sleep_mode=not on_cpu, logprobs_mode="raw_logprobs", enable_prefix_caching=True,
            async_scheduling=False, disable_log_stats=True, worker_extension_cls="__main__.WorkerExtension")
        return {}, {}

    def load(self, message: Message, arrays: Arrays) -> tuple[Message, Arrays]:
        """Take the weights that lie in the shared memory now."""
        if self.sleeps:
            self.llm.wake_up(tags=["weights"])
        self.llm.collective_rpc("load_tensors", args=(self.weights,))
        if self.sleeps:
            self.llm.wake_up(tags=["kv_cache"])
            self.sleeps = False
        return {}, {}

    def sleep(self, message: Message, arrays: Arrays) -> tuple[Message, Arrays]:
        """Give the memory of weights and KV cache back, where the device can; `load` comes next."""
        if self.llm is not None and message["device"] != "cpu" and not self.sleeps:
            self.llm.sleep(level=2)
            self.sleeps = True
        return {}, {}

    def generate(self, message: Message, arrays: Arrays) -> tuple[Message, Arrays]:
        """message: "slots": how many sequences are decoded at the same time; "sampling". arrays: "tokens" and "lens" of
        the prompts, "seeds". The answer has "tokens" and "logprobs" of all responses, and for each its "rows", the
        number of its prompt, its "lens", and "finished"."""
        self._begin_call(message["sampling"])
        most, waiting = message["sampling"]["max_new_tokens"], iter(enumerate(_prompts(arrays)))
        done: dict[int, Any] = {}
        while True:
            while len(self.running) < message["slots"] and (next_one := next(waiting, None)) is not None:
                row, prompt = next_one
                self._add(row, prompt, arrays["seeds"][row], most, message["sampling"])
            if not self.running:
                return {}, _answer(sorted(done.items()))
            done.update(self._step())

    def converse(self, message: Message, arrays: Arrays) -> tuple[Message, Arrays]:
        """Begin a call whose turns "turns" asks for. message: "sampling"."""
        self._begin_call(message["sampling"])
        return {}, {}

    def turns(self, message: Message, arrays: Arrays) -> tuple[Message, Arrays]:
        """Begin turns, and decode until one ends, also one that began before. message: "sampling"; "once": decode one
        token of each at most, since something else may come to the rank meanwhile. arrays: "rows" that begin a turn,
        "tokens" and "lens" of what they have so far, "seeds", "most" tokens of each turn. The answer is as that of
        `generate`, of "rows" whose turn ended."""
        for i, prompt in enumerate(_prompts(arrays)):
            self._add(arrays["rows"][i], prompt, arrays["seeds"][i], arrays["most"][i], message["sampling"])
        ended = self._step() if self.running else []
        while self.running and not ended and not message["once"]:
            ended = self._step()
        return {}, _answer(ended)

    def _begin_call(self, sampling: Mapping[str, Any]) -> None:
        self.llm.reset_prefix_cache()  # what is sampled does not depend on earlier calls
        self.llm.collective_rpc("divide_logits", args=(1.0 if sampling["greedy"] else sampling["temperature"],))
        self.running = set()

    def _add(self, row: int, prompt: list[int], seed: int, most: int, sampling: Mapping[str, Any]) -> None:
        """Begin a response of at most `most` tokens."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        s = sampling
        params = SamplingParams(
            temperature=0.0 if s["greedy"] else 1.0, top_p=s["top_p"], top_k=s["top_k"], min_p=s["min_p"],
            seed=None if s["greedy"] else seed, max_tokens=most, min_tokens=min(s["min_new_tokens"], most),
            stop=s["stop"] or None, stop_token_ids=s["eos_ids"], ignore_eos=True, logprobs=0,
            detokenize=bool(s["stop"]), skip_special_tokens=False, spaces_between_special_tokens=False,
            output_kind=RequestOutputKind.FINAL_ONLY)
        self.llm.llm_engine.add_request(str(row), {"prompt_token_ids": prompt}, params)
        self.running.add(row)

    def _step(self) -> list[tuple[int, Any]]:
        """One token of each sequence under way. Returns those that have ended: (row, what was sampled)."""
        ended = [(int(x.request_id), x.outputs[0]) for x in self.llm.llm_engine.step() if x.finished]
        self.running -= {row for row, _ in ended}
        self.report_progress()
        return ended


def _prompts(arrays: Arrays) -> list[list[int]]:
    tokens, ends = arrays["tokens"].tolist(), list(accumulate(arrays["lens"]))
    return [tokens[end - length:end] for end, length in zip(ends, arrays["lens"], strict=True)]


def _answer(ended: list[tuple[int, Any]]) -> Arrays:
    """What was sampled for rows, one after the other."""
    sampled = [list(x.token_ids) for _, x in ended]
    logprobs = array("f", (at[token].logprob for (_, x), ids in zip(ended, sampled, strict=True)
                           for at, token in zip(x.logprobs, ids, strict=True)))
    return {"tokens": array("q", (t for ids in sampled for t in ids)), "logprobs": logprobs,
            "lens": array("q", map(len, sampled)), "rows": array("q", (row for row, _ in ended)),
            "finished": array("q", (int(x.finish_reason == "stop") for _, x in ended))}


def end_with_parent(parent: int) -> None:
    """End this process once its parent is gone, whatever it computes."""
    while os.getppid() == parent:
        time.sleep(POLL)
    os._exit(1)


def main() -> None:
    parent = os.getppid()
    threading.Thread(target=end_with_parent, args=(parent,), daemon=True).start()
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # what is printed must not get between the answers
    engine = Engine()
    reported = time.monotonic()

    def report_progress() -> None:
        nonlocal reported
        if time.monotonic() - reported >= PROGRESS_EVERY:
            reported = time.monotonic()
            with suppress(BrokenPipeError):
                send(answers, PROGRESS)

    engine.report_progress = report_progress
    verbs: dict[str, Callable[[Message, Arrays], tuple[Message, Arrays]]] = {
        "hello": engine.hello, "open": engine.open, "load": engine.load, "sleep": engine.sleep,
        "generate": engine.generate, "converse": engine.converse, "turns": engine.turns}
    while True:
        try:
            message, arrays = receive(requests)
        except EOFError:
            break
        try:
            answer = verbs[message["verb"]](message, arrays)
        except Exception as error:  # the rank reports it
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}, {}
        try:
            send(answers, *answer)
        except BrokenPipeError:
            break
    sys.stderr.flush()
    os._exit(0)  # nothing of vLLM has anything to save


if __name__ == "__main__":
    main()
