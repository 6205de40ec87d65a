"""The record of a cluster, and the table of what its file may say.

Rates are those of one device and one direction, as the vendor states them; the efficiencies say which share of them
real programs reach. 0 stands for "not known": a file with `nodes`, `gpus` and `memory_gb` alone is enough to compile,
not to simulate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Literal


@dataclass(frozen=True, slots=True)
class Measured:
    """The cost of calls of one model on this machine, as measured by `rlc profile`: (feature, microseconds per
    occurrence)."""

    config: str  # sha256 of the model's config.json
    head: str  # its name
    dtype: str  # of the parameters
    tp: int  # of the shard that was timed
    threads: int  # per rank, of the shard that was timed
    # "call": per micro-batch; "layer": per layer of it; "token": per layer and token; "pair": per layer, token and
    # token before it; "output": per response token
    forward: tuple[tuple[str, float], ...] = ()
    train: tuple[tuple[str, float], ...] = ()  # forward and backward; features as of `forward`
    # "call": per token of all sequences; "layer": per layer; "token": per layer and sequence; "pair": per layer,
    # sequence and token in its KV cache; "output": per sequence
    decode: tuple[tuple[str, float], ...] = ()
    # what the first steps of a shape take in addition; "call": per shape; "layer": per layer
    start: tuple[tuple[str, float], ...] = ()
    update: tuple[tuple[str, float], ...] = ()  # "call": per optimizer step; "element": per parameter element
    tower: tuple[tuple[str, float], ...] = ()  # a forward pass of the vision tower; "image": per token of an image
    # a pass of conversations over what their environments say; "slot": per layer and conversation; the other features
    # as of `forward`
    reply: tuple[tuple[str, float], ...] = ()
    turn: tuple[tuple[str, float], ...] = ()  # decoding of conversations, with what the host decides; as of `decode`

    def under(self, tp: int, kernels: float) -> Measured:
        """The same under another degree that was not measured: what grows with tokens, in proportion, and so what a
        layer takes beyond starting its kernels (microseconds), which is the reading of its weights."""
        if tp == self.tp:
            return self

        def divided(rates: tuple[tuple[str, float], ...]) -> tuple[tuple[str, float], ...]:
            fixed = {k: min(rate, kernels) if k == "layer" else 0.0 if k in DIVIDED else rate for k, rate in rates}
            return tuple((k, fixed[k] + (rate - fixed[k]) * self.tp / tp) for k, rate in rates)

        return replace(self, tp=tp, forward=divided(self.forward), train=divided(self.train),
                       decode=divided(self.decode), reply=divided(self.reply), turn=divided(self.turn))


DIVIDED = ("token", "pair", "output")  # among the ranks of tensor parallelism
PASSES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("forward", "train", "decode", "turn"), ("call", "layer", "token", "pair", "output")),
    "reply": ("call", "layer", "slot", "token", "pair", "output"),
    "start": ("call", "layer"), "update": ("call", "element"), "tower": ("image",),
}


@dataclass(frozen=True, slots=True)
class Distribution:
    """How a quantity of a run varies: by a constant, a lognormal distribution or measured values."""

    mean: float  # of the values, if there are any
    deviation: float = 0.0  # standard deviation of a lognormal distribution; 0: a constant
    values: tuple[float, ...] = ()  # ascending, each equally likely; (): by mean and deviation

    def quantile(self, u: float) -> float:
        """The value below which a share `u` of all are, 0 < u < 1."""
        if self.values:
            return self.values[min(int(u * len(self.values)), len(self.values) - 1)]
        if not self.deviation or not self.mean:
            return self.mean
        log_std = math.sqrt(math.log1p((self.deviation / self.mean) ** 2))
        return self.mean * math.exp(log_std * (NormalDist().inv_cdf(u) - log_std / 2))


@dataclass(frozen=True, slots=True)
class Cluster:
    """`nodes` machines of `gpus` devices, one rank each; 0: unknown. `FIELDS` has the meaning of each field, for
    messages and the documentation."""

    gpus: int = 0  # per machine
    nodes: int = 1  # number of machines
    memory_gb: float = 0.0  # 10^9 bytes per device
    name: str = ""  # in messages
    cores: int = 0  # per machine, shared by its ranks
    threads: int = 0  # per rank
    core_speed: float = 1.0  # a fraction of that of one core alone
    bfloat16_tflops: float = 0.0  # 10^12 operations per second
    float32_tflops: float = 0.0  # 10^12 operations per second
    memory_gb_s: float = 0.0  # 10^9 bytes per second
    link_gb_s: float = 0.0  # 10^9 bytes per second
    link_us: float = 0.0  # microseconds
    reduce_us: float = 0.0  # microseconds per doubling
    reduce_gb_s: float = 0.0  # 10^9 bytes per second
    scatter_us: float = 0.0  # microseconds per doubling
    scatter_gb_s: float = 0.0  # 10^9 bytes per second
    network_gb_s: float = 0.0  # 10^9 bytes per second and device
    network_us: float = 0.0  # microseconds
    node_network_gb_s: float = 0.0  # 10^9 bytes per second and machine
    host_gb_s: float = 0.0  # 10^9 bytes per second
    disk_gb_s: float = 0.0  # 10^9 bytes per second and rank
    kernel_us: float = 0.0  # microseconds
    event_us: float = 0.0  # microseconds
    row_us: float = 0.0  # microseconds
    conversation_us: float = 0.0  # microseconds per conversation
    turn_us: float = 0.0  # microseconds per answer
    environment_us: float = 0.0  # microseconds per conversation
    answer_us: float = 0.0  # microseconds per answer
    compute_units: int = 0  # per device
    dispatch_gb_s: float = 0.0  # 10^9 bytes per second and device
    expert_us: float = 0.0  # microseconds per layer and pass
    expert_imbalance: float = 1.0  # a ratio, at least 1
    cache_gb: float = 0.0  # 10^9 bytes per device
    decode_us: float = 0.0  # microseconds per step
    decode_row_us: float = 0.0  # microseconds per sequence and step
    decode_reduce_us: float = 0.0  # microseconds
    decode_reduce_ranks: int = 0  # most ranks
    sync_s: float = 0.0  # seconds
    sync_gb_s: float = 0.0  # 10^9 bytes per second
    call_s: float = 0.0  # seconds per call
    hidden_bytes: int = 0  # per element
    logit_bytes: float = 0.0  # per entry of the vocabulary and token
    prompts_once: int = 1  # 0 or 1
    matmul_efficiency: float = 1.0  # a fraction
    attention_efficiency: float = 1.0  # a fraction
    memory_efficiency: float = 1.0  # a fraction
    link_efficiency: float = 1.0  # a fraction
    turns: Distribution | None = None  # of a conversation
    turn_tokens: Distribution | None = None  # of the model in a turn
    tool_seconds: Distribution | None = None  # of an answer, in seconds
    reset_seconds: Distribution | None = None  # of the first words of a conversation, in seconds
    source: str = ""  # where the numbers come from
    measured: tuple[Measured, ...] = ()  # calls that `rlc profile` timed
    file: str = field(default="", compare=False)  # the path that it was read from; "" if it has none

    @property
    def place(self) -> str:
        """Where messages point to."""
        return self.file or self.name

    @property
    def world(self) -> int:
        return self.nodes * self.gpus

    def unknown(self) -> tuple[str, ...]:
        """Names of what the file does not say and a simulation needs."""
        needed = [*NEEDED, *(["link_gb_s"] if self.gpus > 1 else []), *(["network_gb_s"] if self.nodes > 1 else [])]
        return tuple(n for n in needed if not getattr(self, n))


NEEDED = ("gpus", "bfloat16_tflops", "float32_tflops", "memory_gb_s")


MOST, LEAST = 1e12, 1e-12  # of any number but 0, in its unit; beyond them times would be no numbers any more


@dataclass(frozen=True, slots=True)
class Field:
    """A key of a cluster file; low <= value <= high, and 0 or at least `LEAST`."""

    kind: Literal["int", "float", "text", "distribution"]  # of its value
    meaning: str  # for messages and the documentation
    low: float = 0.0  # the smallest value
    high: float = MOST  # the largest value
    above: bool = False  # low < value


FIELDS: dict[str, Field] = {
    "nodes": Field("int", "number of machines", 1, 16_384),
    "gpus": Field("int", "devices per machine, one rank each", 1, 256),
    "memory_gb": Field("float", "memory per device, in 10^9 bytes", 1e-9, 1e9),  # from a byte: 0 bytes are no limit
    "name": Field("text", "the name in messages"),
    "cores": Field("int", "CPU cores shared by the ranks of a machine; 0: each rank has its own device"),
    "threads": Field("int", "CPU threads per rank, where ranks share cores; 0: cores divided by ranks"),
    "core_speed": Field("float", "speed of a core when all are busy, relative to one alone", 0, 1, True),
    "bfloat16_tflops": Field("float", "dense matrix products in bfloat16, 10^12 operations per second"),
    "float32_tflops": Field("float", "dense matrix products in float32, 10^12 operations per second"),
    "memory_gb_s": Field("float", "memory bandwidth of a device, 10^9 bytes per second"),
    "link_gb_s": Field("float", "bandwidth between two devices of a machine, one direction"),
    "link_us": Field("float", "latency of a message inside a machine, in microseconds"),
    "reduce_us": Field("float", "latency of a collective inside a machine, per doubling of its ranks; 0: as link_us"),
    "reduce_gb_s": Field("float", "bandwidth per device of a collective inside a machine; 0: as link_gb_s"),
    "scatter_us": Field("float", "as reduce_us, for a reduce-scatter, which some libraries implement less efficiently"),
    "scatter_gb_s": Field("float", "as reduce_gb_s, for a reduce-scatter; 0: as any collective"),
    "network_gb_s": Field("float", "network bandwidth per device to other machines, one direction"),
    "network_us": Field("float", "latency of a message between machines, in microseconds"),
    "node_network_gb_s": Field("float", "network bandwidth per machine, if its devices share it; 0: not shared"),
    "host_gb_s": Field("float", "bandwidth between a device and host memory, one direction"),
    "disk_gb_s": Field("float", "file bandwidth per rank, reading or writing"),
    "kernel_us": Field("float", "time to launch a kernel, in microseconds"),
    "event_us": Field("float", "runtime overhead per event, in microseconds"),
    "row_us": Field("float", "runtime overhead per row that an event divides or moves, in microseconds"),
    "conversation_us": Field("float", "time in which a rank starts the process of a conversation's environment, in "
                             "microseconds"),
    "turn_us": Field("float", "time of a rank per answer of an environment: asking for it, and making its tokens, in "
                     "microseconds"),
    "environment_us": Field("float", "time that the process of an environment computes per conversation beyond its "
                            "answers, where ranks share cores, in microseconds"),
    "answer_us": Field("float", "time that the process of an environment computes per answer beyond what the user's "
                       "code does, where ranks share cores, in microseconds"),
    "compute_units": Field("int", "multiprocessors of a device, which matrix products fill tile by tile; 0: products "
                           "of any shape are equally efficient"),
    "dispatch_gb_s": Field("float", "bandwidth per device of moving tokens to their experts and back, permutation "
                           "included, one direction; 0: as an all-to-all"),
    "expert_us": Field("float", "host time of the experts of a layer, per forward or backward pass, in microseconds"),
    "expert_imbalance": Field("float", "tokens of the rank whose experts are chosen most, relative to the mean", 1),
    "cache_gb": Field("float", "memory per device for the weights and the KV cache of a serving engine; 0: the plan's "
                      "own engine generates"),
    "decode_us": Field("float", "host time of a serving engine per decoding step, in microseconds"),
    "decode_row_us": Field("float", "host time of a serving engine per sequence and decoding step, in "
                           "microseconds"),
    "decode_reduce_us": Field("float", "latency of an all-reduce of a serving engine inside a machine, in "
                              "microseconds; 0: as of any collective"),
    "decode_reduce_ranks": Field("int", "most ranks of such an all-reduce; over more, it is as any collective; 0: no "
                                 "limit"),
    "sync_s": Field("float", "time to give a serving engine new weights and wake it up, in seconds"),
    "sync_gb_s": Field("float", "rate at which a serving engine gets the bytes of all weights, 10^9 bytes per second; "
                       "0: no limit"),
    "call_s": Field("float", "time around each call of a model in which a driver prepares and moves data, in seconds"),
    "hidden_bytes": Field("int", "bytes of an element of the hidden states, which tensor-parallel ranks exchange and "
                          "kernels move between the matrix products; 0: as of the parameters, as rldsl stores them"),
    "logit_bytes": Field("float", "bytes that kernels move per entry of the vocabulary and token between the output "
                         "product and the log-probabilities; 0: what rldsl's kernels move, while the product runs"),
    "prompts_once": Field("int", "1: the prompt of several responses in a micro-batch is computed once, as rldsl does; "
                          "0: with each of them, as other systems do", 0, 1),
    "matmul_efficiency": Field("float", "fraction of the stated rate that matrix products reach", 0, 1, True),
    "attention_efficiency": Field("float", "fraction of the stated rate that attention reaches", 0, 1, True),
    "memory_efficiency": Field("float", "fraction of the memory bandwidth that is reached", 0, 1, True),
    "link_efficiency": Field("float", "fraction of link and network bandwidth that is reached", 0, 1, True),
    "turns": Field("distribution", "turns of the model in a conversation with an environment; not given: the most", 1),
    "turn_tokens": Field("distribution", "tokens of the model in a turn; not given: `max_new_tokens`", 1),
    "tool_seconds": Field("distribution", "seconds in which an environment answers a turn; not given: 0"),
    "reset_seconds": Field("distribution", "seconds in which an environment begins a conversation, in `reset` or "
                           "`init`; not given: 0"),
    "source": Field("text", "where the numbers come from"),
}
