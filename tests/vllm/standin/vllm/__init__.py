"""A stand-in for vLLM 0.32: what the backend asks of it, with its signatures and none of its speed.

A tiny Llama or Qwen3 in plain torch, computed anew for each token of one sequence after another. Misuse that the real
one would answer with wrong results is an error here: weights that were never loaded, or that are asked for while the
engine sleeps. Environment variables that tests set: STANDIN_DIE_AT, the number of the generated token at which the
process ends; STANDIN_REFUSE, a text that the constructor raises; STANDIN_LOG, a file with a line per call.
"""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm.sampling_params import RequestOutputKind

__version__ = os.environ.get("STANDIN_VERSION", "0.32.0")


def log(line: str) -> None:
    if file := os.environ.get("STANDIN_LOG"):
        with Path(file).open("a") as opened:
            opened.write(f"{os.getpid()} {line}\n")


@dataclass(kw_only=True)
class SamplingParams:
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    max_tokens: int
    min_tokens: int
    stop: list[str] | None
    stop_token_ids: list[int]
    ignore_eos: bool
    logprobs: int
    detokenize: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    output_kind: RequestOutputKind


@dataclass
class Logprob:
    logprob: float


@dataclass
class Completion:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class Output:
    request_id: str
    outputs: list[Completion]
    finished: bool


@dataclass
class Request:
    id: str
    prompt: list[int]
    params: SamplingParams
    generator: torch.Generator
    made: Completion = field(default_factory=Completion)


class Packing:
    """Of a layer that multiplies with a copy of its weight, as on a CPU."""

    def process_weights_after_loading(self, layer: Any) -> None:
        copy = layer.weight.clone()
        layer.cpu_linear = lambda x: x.float() @ copy.float().T


class Layer:
    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.quant_method = weight, Packing()
        self.quant_method.process_weights_after_loading(self)


class Model:
    """A decoder with the parameters of a HuggingFace directory; random until `load_weights`."""

    def __init__(self, directory: str) -> None:
        self.config = json.loads((Path(directory) / "config.json").read_text())
        self.directory, self.weights = directory, dict[str, torch.Tensor]()
        self.embedding: Any = None
        self.head: Any = None
        from safetensors import safe_open

        with safe_open(f"{directory}/model.safetensors", "pt") as opened:
            self.shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118

    def named_parameters(self) -> list[tuple[str, Any]]:
        return [(name, None) for name in self.shapes]

    def load_weights(self, weights: Any) -> set[str]:
        found = {name: tensor.clone() for name, tensor in weights}
        if unknown := found.keys() - self.shapes:
            raise ValueError(f"There is no module or parameter named {sorted(unknown)[0]!r}")
        for name, x in found.items():
            self.weights.setdefault(name, torch.empty_like(x)).copy_(x)
        embedding = self.weights["model.embed_tokens.weight"]
        self.embedding = self.embedding or Layer(embedding)
        # a head that shares the weight of the embedding is not loaded, so nothing packs it again
        if "lm_head.weight" in found or self.head is None:
            self.head = Layer(self.weights.get("lm_head.weight", embedding))
        return set(found)

    def modules(self) -> list[Any]:
        return [self.embedding, self.head]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head.cpu_linear(hidden)
        return logits

    def hidden(self, tokens: list[int]) -> torch.Tensor:
        """[1, H] of the last token."""
        c, w = self.config, self.weights
        heads, groups = c["num_attention_heads"], c["num_key_value_heads"]
        size = c.get("head_dim") or c["hidden_size"] // heads
        x = w["model.embed_tokens.weight"][tokens].float()
        theta = c["rope_parameters"]["rope_theta"]
        angles = torch.outer(torch.arange(len(tokens)), theta ** (-torch.arange(0, size, 2) / size))
        cos, sin = (torch.cat([f(angles)] * 2, -1)[:, None] for f in (torch.cos, torch.sin))

        def norm(y: torch.Tensor, name: str) -> torch.Tensor:
            return y * (y.pow(2).mean(-1, keepdim=True) + c["rms_norm_eps"]).rsqrt() * w[name].float()

        def turned(y: torch.Tensor) -> torch.Tensor:
            a, b = y.chunk(2, -1)
            return y * cos + torch.cat([-b, a], -1) * sin

        for i in range(c["num_hidden_layers"]):
            at = f"model.layers.{i}"

            def linear(y: torch.Tensor, name: str, at: str = at) -> torch.Tensor:
                return y @ w[f"{at}.{name}.weight"].float().T

            y = norm(x, f"{at}.input_layernorm.weight")
            q, k, v = (linear(y, f"self_attn.{n}_proj").view(len(tokens), -1, size) for n in "qkv")
            if f"{at}.self_attn.q_norm.weight" in w:
                q, k = norm(q, f"{at}.self_attn.q_norm.weight"), norm(k, f"{at}.self_attn.k_norm.weight")
            q, k = turned(q), turned(k)
            k, v = (t.repeat_interleave(heads // groups, 1) for t in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) / size**0.5
            scores = scores.masked_fill(torch.ones(len(tokens), len(tokens)).triu(1).bool(), -torch.inf).softmax(-1)
            x = x + linear(torch.einsum("hqk,khd->qhd", scores, v).flatten(1), "self_attn.o_proj")
            y = norm(x, f"{at}.post_attention_layernorm.weight")
            x = x + linear(torch.nn.functional.silu(linear(y, "mlp.gate_proj")) * linear(y, "mlp.up_proj"),
                           "mlp.down_proj")
        return norm(x[-1:], "model.norm.weight")


class Runner:
    def __init__(self, directory: str) -> None:
        self.model, self.asleep = Model(directory), set[str]()

    def get_model(self) -> Model:
        return self.model

    def reload_weights(self, weights_iterator: Any) -> None:
        if "weights" in self.asleep:
            raise RuntimeError("weights have no memory: wake them first")
        self.model.load_weights(weights_iterator)


class LLMEngine:
    def __init__(self, runner: Runner, slots: int, max_len: int) -> None:
        self.runner, self.slots, self.max_len = runner, slots, max_len
        self.requests: list[Request] = []
        self.produced = 0

    def add_request(self, request_id: str, prompt: dict[str, list[int]], params: SamplingParams) -> str:
        if self.runner.asleep:
            raise RuntimeError("the engine sleeps")
        if not self.runner.model.weights:
            raise RuntimeError("weights were never loaded")
        if len(prompt["prompt_token_ids"]) + params.max_tokens > self.max_len:
            raise ValueError("the sequence is longer than max_model_len")
        generator = torch.Generator()
        if params.seed is not None:
            generator.manual_seed(params.seed)
        self.requests.append(Request(request_id, prompt["prompt_token_ids"], params, generator))
        if len(self.requests) > self.slots:
            raise RuntimeError("more requests than slots: they would be decoded together in another order")
        return request_id

    @torch.no_grad()
    def step(self) -> list[Output]:
        ended = []
        for request in self.requests:
            self.produced += 1
            if self.produced == int(os.environ.get("STANDIN_DIE_AT", 0)):
                print("the stand-in ends here", flush=True)
                os._exit(3)
            self._sample(request)
            if request.made.finish_reason is not None:
                ended.append(request)
        self.requests = [r for r in self.requests if r not in ended]
        return [Output(r.id, [r.made], True) for r in ended]

    def _sample(self, request: Request) -> None:
        p, made, model = request.params, request.made, self.runner.model
        logits = model.compute_logits(model.hidden(request.prompt + made.token_ids))[0]
        raw = logits.log_softmax(-1)
        if len(made.token_ids) < p.min_tokens:
            logits[p.stop_token_ids] = -torch.inf
        if p.temperature == 0:
            token = int(logits.argmax())
        else:
            token = int(torch.multinomial(_filtered(logits / p.temperature, p), 1, generator=request.generator))
        made.token_ids.append(token)
        made.logprobs.append({token: Logprob(float(raw[token]))})
        if token in p.stop_token_ids or p.stop and self._has_stopped(request):
            made.finish_reason = "stop"
        elif len(made.token_ids) == p.max_tokens:
            made.finish_reason = "length"

    def _has_stopped(self, request: Request) -> bool:
        text = _tokenizer(self.runner.model.directory).decode(request.made.token_ids)
        return any(stop in text for stop in request.params.stop or ())


@cache
def _tokenizer(directory: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def _filtered(logits: torch.Tensor, p: SamplingParams) -> torch.Tensor:
    probs = logits.softmax(-1)
    if p.min_p:
        probs = probs.where(probs >= p.min_p * probs.max(), 0)
    if p.top_k:
        probs = probs.where(probs >= probs.topk(p.top_k).values[-1], 0)
    if p.top_p < 1:
        ordered, at = (probs / probs.sum()).sort(descending=True)
        kept = ordered.where(ordered.cumsum(-1) - ordered < p.top_p, 0)
        probs = torch.zeros_like(probs).scatter(0, at, kept)
    return probs


class LLM:
    def __init__(self, *, model: str, dtype: str, load_format: str, seed: int, trust_remote_code: bool,
                 generation_config: str, max_model_len: int, max_num_seqs: int, kv_cache_memory_bytes: int,
                 enforce_eager: bool, enable_sleep_mode: bool, logprobs_mode: str, enable_prefix_caching: bool,
                 async_scheduling: bool, disable_log_stats: bool, worker_extension_cls: str) -> None:
        if text := os.environ.get("STANDIN_REFUSE"):
            raise ValueError(text)
        if world := sorted({"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} & os.environ.keys()):
            raise RuntimeError(f"the world of the run is visible: {world}")
        if trust_remote_code or load_format != "dummy" or logprobs_mode != "raw_logprobs" or async_scheduling:
            raise ValueError("another engine than the one that is stood in for")
        config = json.loads((Path(model) / "config.json").read_text())
        least = max_model_len * 2 * config["num_key_value_heads"] * config["head_dim"] * config["num_hidden_layers"] * 4
        if kv_cache_memory_bytes < least * max_num_seqs:
            raise ValueError("the KV cache has no room for all sequences")
        self.can_sleep = enable_sleep_mode
        self.runner = Runner(model)
        module, name = worker_extension_cls.rsplit(".", 1)
        self.worker = type("Worker", (getattr(importlib.import_module(module), name),), {})()
        self.worker.model_runner = self.runner
        self.llm_engine = LLMEngine(self.runner, max_num_seqs, max_model_len)
        log(f"open len={max_model_len} seqs={max_num_seqs} dtype={dtype}")

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        log(method)
        return [getattr(self.worker, method)(*args)]

    def reset_prefix_cache(self) -> bool:
        return True

    def sleep(self, level: int) -> None:
        if not self.can_sleep or level != 2:
            raise ValueError("sleep mode is off")
        log("sleep")
        self.runner.asleep = {"weights", "kv_cache"}
        self.runner.model.weights, self.runner.model.head, self.runner.model.embedding = {}, None, None

    def wake_up(self, tags: list[str]) -> None:
        log(f"wake {','.join(tags)}")
        self.runner.asleep -= set(tags)
