"""The published rows: what was run, and how long it took. Nothing here is computed.

A row is a program with its settings, a placement file (`places/NAME.place.rlf`) and a cluster file. Sources:
[nemo5] github.com/NVIDIA-NeMo/RL, tag v0.5.0, docs/about/performance-summary.md; recipes of that tag in
        examples/configs/recipes/llm/performance.
[nemo6] the same, tag v0.7.0 of the page, section "NeMo RL v0.6"; recipes of tag v0.6.0.
[verl1] github.com/verl-project/verl, 1dda039b, docs/advance/one_step_off.md; scripts next to it.
[verl2] the same, docs/advance/fully_async.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# tokens of a prompt, on average: what the published throughput of on-policy rows counts besides the responses
PROMPTS = {"llama-3.1-8b": 127.0, "llama-3.1-70b": 127.0, "qwen3-32b": 104.0, "qwen3-30b-a3b": 103.0,
           "qwen3-235b-a22b": 118.0, "qwen2.5-math-7b": 150.0}
LOG_STD = 0.75  # standard deviation of the logarithm of the lengths; assumed, see docs/published.md


@dataclass(frozen=True, slots=True)
class Row:
    """One published run."""

    name: str  # also of its placement file
    source: str  # key above
    model: str  # name of its config in models/
    cluster: str  # name of its cluster file
    gpus: int  # devices, all together
    domain: int  # devices of a machine, or of an NVLink domain
    batch: int  # prompts per step
    n: int  # responses to each
    most: int  # tokens of the longest sequence, or with verl of the longest response
    response: float  # tokens of a response, on average
    seconds: float  # published, of a step
    updates: int = 4  # optimizer steps in it
    lag: int = 0  # steps that generation runs ahead
    throughput: float = 0.0  # published tokens per second and GPU; 0: not published
    program: str = "grpo"  # name of the program
    cache: float = 0.6  # share of the memory that the engine may use
    phases: Mapping[str, float] = field(default_factory=dict)  # published seconds of calls
    baseline: str = ""  # the row without the lag on equally many devices
    standin: str = ""  # how the placement differs from the published one, where ours cannot express it
    scattered: bool = False  # its groups span racks, so what leaves a host goes over the network (`SCATTERED`)

    @property
    def moe(self) -> bool:
        return "-a" in self.model

    @property
    def unevenness(self) -> float:
        """The mean of the published steps times the mean of their reciprocals, which is in the published throughput: 1
        where all steps took equally long."""
        tokens = self.batch * self.n * (self.prompt + self.response)
        return self.throughput * self.seconds * self.gpus / tokens

    @property
    def prompt(self) -> float:
        """Tokens of a prompt, on average."""
        return PROMPTS[self.model]


def nemo(name: str, source: str, model: str, cluster: str, gpus: int, response: float, throughput: float,
         seconds: float, lag: int = 0, baseline: str = "", domain: int = 8, standin: str = "", large: bool = False,
         cache: float = 0.0, scattered: bool = False) -> Row:
    """large: as the recipes of 235B have it."""
    return Row(name, source, model, cluster, gpus, domain, 16 if large else 64, 32, 8192 if large else 4096, response,
               seconds, 1 if large else 4, lag, throughput, cache=cache or (0.8 if lag else 0.6), baseline=baseline,
               standin=standin, scattered=scattered)


TP_IN_DP = "Megatron's ep spans dp, cp and tp: here ep spans dp alone, so the split over tp and cp is one over dp"
LLAMA, Q32, Q30, Q235 = "llama-3.1-8b", "qwen3-32b", "qwen3-30b-a3b", "qwen3-235b-a22b"
ROWS = (
    nemo("llama8b-h100-16", "nemo5", LLAMA, "h100", 16, 1019, 1581, 92.8),
    nemo("llama8b-h100-16-off", "nemo5", LLAMA, "h100", 16, 1123, 2478, 64.8, 1, "llama8b-h100-16"),
    nemo("qwen32b-h100-32", "nemo5", Q32, "h100", 32, 3251, 571, 376),
    nemo("qwen32b-h100-64-off", "nemo5", Q32, "h100", 64, 3252, 538, 200, 1),
    nemo("llama8b-gb200-8", "nemo5", LLAMA, "gb200", 8, 1066, 3359, 91.0, domain=64),
    nemo("llama8b-gb200-8-off", "nemo5", LLAMA, "gb200", 8, 1107, 4463, 71.1, 1, "llama8b-gb200-8", domain=64),
    nemo("qwen32b-gb200-16", "nemo5", Q32, "gb200", 16, 3253, 1127, 381, domain=64),
    nemo("qwen32b-gb200-32-off", "nemo5", Q32, "gb200", 32, 3258, 1025, 210, 1, domain=64),
    nemo("qwen30b-h100-32", "nemo6", Q30, "h100", 32, 3203, 1102, 192),
    nemo("qwen30b-h100-32-off", "nemo6", Q30, "h100", 32, 3201, 1414, 152, 1, "qwen30b-h100-32"),
    nemo("qwen30b-gb200-16", "nemo6", Q30, "gb200", 16, 3199, 1910, 221, domain=64),
    nemo("qwen30b-gb200-16-off", "nemo6", Q30, "gb200", 16, 3197, 1406, 301, 1, "qwen30b-gb200-16", domain=64),
    nemo("qwen30b-gb200-32-off", "nemo5", Q30, "gb200", 32, 3204, 1558, 136, 1, domain=64),
    nemo("qwen235b-h100-128", "nemo6", Q235, "h100-pairs", 128, 5698, 58.9, 395, domain=16, standin=TP_IN_DP,
         large=True),
    nemo("qwen235b-h100-256", "nemo6", Q235, "h100-pairs", 256, 5713, 37.4, 312, domain=16, standin=TP_IN_DP,
         large=True),
    nemo("qwen235b-h100-256-off", "nemo6", Q235, "h100", 256, 5721, 58.7, 231, 1, "qwen235b-h100-256",
         standin=TP_IN_DP, large=True),
    nemo("qwen235b-gb200-64", "nemo6", Q235, "gb200", 64, 5709, 163, 286, domain=64, standin=TP_IN_DP, large=True,
         cache=0.4),
    nemo("qwen235b-gb200-128", "nemo6", Q235, "gb200", 128, 5693, 67.4, 345, domain=8, standin=TP_IN_DP, large=True,
         scattered=True),
    nemo("qwen235b-gb200-128-off", "nemo6", Q235, "gb200", 128, 5705, 85.5, 278, 1, "qwen235b-gb200-128", domain=8,
         standin=TP_IN_DP, large=True, scattered=True),
)

# The runs from which the constants of the engine and of the driver come; no row above is among them: NeMo-RL v0.3, in
# github.com/NVIDIA-NeMo/RL/issues/959. Its recipes are those of the commits d066750c (8B) and 4987695e (70B).
CALIBRATION = (
    Row("llama8b-h100-8", "issue 959", LLAMA, "h100", 8, 8, 64, 32, 4096, 795, 112,
        phases={"train": 28, "generate": 58, "logprobs": 18, "refit": 5}),
    Row("llama70b-h100-64", "issue 959", "llama-3.1-70b", "h100", 64, 8, 64, 32, 4096, 398, 147,
        phases={"train": 28, "generate": 84, "logprobs": 18, "refit": 14}),
)

# Phases are published, but neither the mean length nor a throughput. What is predicted is the gain of generating one
# step ahead. `generate` is the engine's time, "generate_sequences"; `switch` is what the table's "gen" adds to it where
# the devices also train; seconds of a step in no phase are left over. With a lag, "wait_prev_gen" (45 and 59 s) is a
# result of the schedule, and no duration.
VERL = tuple(Row(name, "verl1", "qwen2.5-math-7b", "h20", 16, 4, 512, n, most, 0.0, seconds, 16, lag, 0.0, "dapo", 0.8,
                 phases, baseline) for name, n, most, seconds, lag, phases, baseline in (
    ("verl-fsdp2", 12, 20480, 749, 0, {"generate": 247, "switch": 74, "logprobs": 88, "train": 286}, ""),
    ("verl-fsdp2-off", 12, 20480, 520, 1, {"generate": 458, "logprobs": 108, "train": 337}, "verl-fsdp2"),
    ("verl-megatron", 16, 8192, 699, 0, {"generate": 162, "switch": 45, "logprobs": 119, "train": 344}, ""),
    ("verl-megatron-off", 12, 8192, 566, 1, {"generate": 501, "logprobs": 120, "train": 347}, "verl-megatron")))

# What other releases of NeMo-RL published for the same recipe with the same layout, in seconds of a step: how far a
# published step is from the same one measured again. v0.5 is [nemo5]; "2026-06" is github.com/NVIDIA-NeMo/RL/pull/2986.
AGAIN: Mapping[str, Mapping[str, float]] = {
    "qwen30b-h100-32": {"v0.5": 198}, "qwen30b-h100-32-off": {"v0.5": 154},
    "qwen235b-h100-128": {"v0.5": 431}, "qwen235b-h100-256-off": {"v0.5": 203},
    "qwen30b-gb200-16": {"v0.5": 232, "2026-06": 250},
    "qwen235b-gb200-64": {"v0.5": 332}, "qwen235b-gb200-128-off": {"v0.5": 268}}

# Rows with more devices than a rack has (72): 32 hosts of four. At tag v0.6.0 NeMo-RL numbers the devices by the id of
# their host in Ray (`virtual_cluster.py`, `_get_sorted_bundle_indices`; `vllm_generation.py`), which is random, and not
# by rack; placing by rack came with pull/2612, and these recipes ask for it since pull/3069. With 16 hosts in each of
# two racks, some engine of tp=8 (two hosts) spans both with a probability of 0.99998 (0.997 where half of the devices
# generate), and of the groups of ep=16 (four hosts) some has one host alone with 0.99 (0.94): all that this host sends
# to the others, three quarters, leaves the rack, as if no two hosts shared one. A step waits for the slowest of them.
SCATTERED = tuple(row.name for row in ROWS if row.scattered)
ONE_RACK = 64  # devices of a rack that these rows would use if no group spanned racks

# Published, and not simulated: the cost model has no terms for latent attention, Mamba layers and linear attention, or
# what was run is not published.
LEFT_OUT = {
    "DeepSeek-V3, 256 and 512 H100, 128 and 256 GB200 [nemo6]": "latent attention",
    "DeepSeek-V3, 96 H20 [verl, docs/perf/dpsk.md]": "latent attention",
    "Nemotron-3-Nano-30B-A3B, 128 H100 [nemo6]": "Mamba layers; the time of its environments is not published",
    "Qwen3-30B-A3B 8-step off, 192 H100 [nemo6]": "the split of the devices between generation and training is in a "
                                                  "recipe with a global batch that differs from the table",
    "FP8 rows [nemo5, nemo6]": "our models are float32 or bfloat16",
    "fully_async [verl2]": "partial rollouts and a queue: not a plan; the mean length is not published",
    "Qwen3.5-35B-A3B, 4 nodes [verl, v1_async_trainer.md]": "linear attention; the device is not published",
}
