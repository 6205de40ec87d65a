"""Writes docs/families.md: what runs of every causal language model that the installed transformers has.

    python -m tests.families.table docs/families.md [family ...]

Each architecture gets a tiny random model, which runs here, in one process, against plain transformers: weights after
loading (bitwise), log-probs, gradients, and log-probs of two pipeline stages; generation against its own log-probs.
The other columns are what the compiler offers.
"""

from __future__ import annotations

import os
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch

from rldsl.backends.torch.model.model_inputs import pack_inputs
from rldsl.backends.torch.model.outputs import model_outputs
from rldsl.backends.torch.shard import TorchShard
from rldsl.models.families import Family, describe
from rldsl.plan.backends import described
from rldsl.plan.model import Mesh
from rldsl.runtime.backend import Axes, Axis
from tests.backend_torch.shards import layout_of, pack, plan_model
from tests.families.checks import ROWS, Expected, check, expected, refusal
from tests.families.tiny_configs import make

LIMIT = 1e-5
# models whose results under torch's two kinds of attention differ by more than that in float32; Jamba, whose gradients
# in float32 differ in transformers itself from those in float64 by 1.4e-5 of the largest number; MiniCPM3, whose
# log-probs do so by 1.2e-5: they are as large as 55, where neighbors in float32 differ by 3.8e-6
NOISE = {"gemma4_text": 3e-4, "gemma4_unified_text": 3e-4, "jamba": 5e-5, "minicpm3": 2e-5, "rembert": 5e-5}
# architectures of which no tiny model is made here -> why
UNBUILT = {
    "blt": "its tables of hashes have fixed sizes of gigabytes", "git": "its text model is built with an image encoder",
    "dbrx": "transformers cannot build it from a config", "gemma3n": "it needs timm",
    "gemma4_assistant": "a drafter for speculative decoding",
    "gemma4_unified_assistant": "a drafter for speculative decoding",
    "musicgen": "a decoder of sounds", "musicgen_melody": "a decoder of sounds",
    "qwen4_exp": "its default config cannot be built", "qwen4_exp_text": "its default config cannot be built",
    "reformer": "transformers refuses its decoder", "zamba": "its default config cannot be built small",
    "phi4_multimodal": "it is built with encoders of images and sounds",
} | {name: "composite: its text model has a row of its own" for name in (
    "dots3_note", "emu3", "fuyu", "gemma3", "gemma4", "gemma4_unified", "got_ocr2", "llama4", "mllama",
    "moss_transcribe_diarize", "qwen3_5", "qwen3_5_moe")}
# of those that people ask for, `test_named.py` runs every degree that is offered
NAMED = ("gemma3_text", "gemma4_text", "gpt_oss", "deepseek_v3", "qwen3_next", "qwen3_5_text", "llama4_text", "glm4",
         "glm4_moe", "minimax", "minimax_m2", "falcon_h1", "jamba", "granitemoehybrid")
COLUMNS = ("how", "log-probs", "generate", "train", "dp", "pp", "tp", "cp", "ep", "zero", "LoRA", "invariant",
           "megatron")
YES, NO = "yes", "no"


def architectures() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def staged(path: str) -> torch.Tensor:
    """Log-probs of the responses of ROWS from two pipeline stages, one after the other in this process."""
    model, layout, mesh = plan_model(path), layout_of(pp=2), Mesh("m0", ((0, 2),))
    stages = []
    for i in range(2):
        alone, both = Axis((i,), 0, None), Axis((0, 1), i, None)
        axes = Axes(dp=alone, tp=alone, pp=both, cp=alone, mesh=both, ep=alone, expert_dp=alone)
        stages.append(TorchShard(model, layout, mesh, axes, torch.device("cpu"), True, False).stage)
    inputs = pack_inputs((pack(ROWS),), torch.device("cpu"), Axis((0,), 0, None), stages[0].sequence_parallel)
    hidden = None
    for stage in stages:
        hidden = stage.forward(inputs.tokens, inputs.attention.positions, inputs.attention, hidden)
    (found,) = model_outputs(stages[1], hidden, inputs, ["logprobs"], 1.0)["logprobs"]
    return found.detach()


def measured(path: str, right: Expected, family: Family, limit: float) -> dict[str, str]:
    found = {}
    for _, what, error in check(0, path, [layout_of()], right):
        name = "log-probs" if what == "logprobs" else what
        wrong = error != 0 if what == "load" else not error < limit
        found[name] = f"differs by {error:.0e}" if wrong else YES
    if found.pop("load") != YES:
        found["log-probs"] = "weights are not those of the directory"
    found["dp"] = found["log-probs"]
    found["pp"] = family.pp_problem
    if not family.pp_problem:
        error = float((staged(path) - right.logprobs).abs().max())
        found["pp"] = YES if error < limit else f"differs by {error:.0e}"
    return found


def offered(family: Family) -> dict[str, str]:
    """What follows from the description alone."""
    whole = bool(family.recurrent or family.by_rows)
    megatron = described("megatron")
    problem = megatron.problem(family, layout_of()) if megatron is not None else "it is not installed"
    return {"how": "rows" if family.by_rows else "states" if family.recurrent else "packed",
            "tp": family.tp_problem or YES,
            "cp": "it needs complete sequences" if whole else YES,
            "ep": YES if family.experts else NO, "zero": YES, "LoRA": YES if family.linears else NO,
            "invariant": family.invariant_problem or YES, "megatron": NO if problem else YES}


def row(family: str) -> dict[str, str]:
    """Column -> "yes", "no", or the reason why not. Instead "why", where nothing runs, or "unbuilt", where there is no
    tiny model: the reason."""
    if family in UNBUILT:
        return {"unbuilt": UNBUILT[family]}
    with tempfile.TemporaryDirectory() as directory:
        try:
            path = make(Path(directory) / "m", family)
        except Exception as error:
            return {"unbuilt": refusal(error)}
        try:
            right = expected(path)
        except Exception as error:
            return {"unbuilt": f"transformers does not run it: {refusal(error)}"}
        try:
            found = describe(path, "causal_lm")
            return offered(found) | measured(path, right, found, NOISE.get(family, LIMIT))
        except Exception as error:
            return {"why": refusal(error).replace(f' of "{path}"', "")}


HEAD = """# Model families

Every architecture that transformers {version} calls a causal language model, as `python -m tests.families.table
docs/families.md` has found it with a tiny random model of each, in float32 on the CPU.

- **Measured**, in one process, against plain transformers: log-probs (yes also says that weights after loading are
  bitwise those of the directory) and train, the gradients of one step, to {limit:.0e}; generate, the log-probs of
  greedy responses against those of the same model; pp, the log-probs of two stages, one run after the other. Gradients
  with numbers above 1 are compared relative to the largest one. Wider limits, since results of transformers' own kinds
  of attention, or its own numbers in float32 and float64, differ by more:
  {noise}.
- **Not measured** here: dp repeats log-probs, and tp, cp, ep, zero, LoRA, invariant and megatron are what the compiler
  offers, from the description of the family. `tests/families/test_named.py` measures dp=2 and, where they are offered,
  pp=2 and tp=2 of {named} families with a process per rank.
- **packed**: a batch is one packed row. **states**: so it is, and recurrent layers carry a state for each sequence,
  which decoding keeps in its slots. **rows**: every sequence is a padded row of its own, and decoding runs sequences
  from their beginning for each token: it is right for every causal model, and slow. No two steps of it have the same
  shapes, so none is captured and replayed, as those of the others are on CPUs.
- What is neither yes nor no is the reason why something is refused, or how it differs.
- gpt-oss directories with MXFP4 weights are read as they are, unpacked to the model's `dtype` bit for bit as
  transformers does; what is saved is not packed (`tests/families/test_packed_weights.py`). Other quantized weights are
  RL0721.
- The memory estimate counts what recurrent layers keep, from a trial of their modules in transformers' own torch code,
  without storage, when a model is described. In GRPO on the CPU it is within 10 % of measured peaks for Qwen3-Next,
  Falcon-H1, Jamba and Mamba-2, in float32 and bfloat16, with adapters and with pp (`tests/memory/test_recurrent.py`);
  kernels of other packages, and those of GPUs, may need less. Blocks with experts in a form of their own (gpt-oss,
  Llama 4) are counted by the same trials, and attention with sinks or capped scores: within 10 % for gpt-oss, Llama 4
  and Gemma 2, with adapters, tp and pp, too (`tests/memory/test_expert_blocks.py`). So it is for latent attention,
  whose values may be narrower than its keys, routers that multiply in float32, and experts after dense layers
  (DeepSeek-V3, GLM-4.5, GLM-4.7-Flash, MiniCPM3, Qwen3-MoE; `tests/memory/test_latent_attention.py`). `rlc compile`
  says what it leaves out: attention and decoding in rows, and what a trial fails for.
- Router biases that DeepSeek-V3 and its relatives choose experts with (`e_score_correction_bias`) get no gradient. They
  stay as they are in the directory, as in transformers, or move by the load of the experts where a train call has
  [`router_bias_update_rate`](language.md#router-biases).
- Routers that multiply in float32 in transformers' half-precision models (DeepSeek-V2 and V3, GLM-4.5, dots.1, HY-V3,
  Hunyuan, LongCat-Flash and others of their form) do so here, too, outside of autocast: of equal hidden states they
  choose equal experts, bit for bit (`tests/backend_torch/test_float32_routers.py`). Those of Qwen, Mixtral and
  MiniMax-M2 multiply in bfloat16 in both.
- What transformers loads in float32 into a bfloat16 model is float32 here in every copy, too: router biases of most
  families that have one, weights of the routers of Beam, ERNIE 4.5, Flint and Hunyuan, and numbers of recurrent layers
  (Bailing, OLMo Hybrid) among others (`tests/moe/test_float32_parameters.py`).
- The tiny MiniCPM3's log-probs are as large as 55, where neighbors in float32 differ by 3.8e-6. With rldsl's kernels
  for CPUs they differ from transformers' by 1.1e-5; from float64, rldsl's differ by 1.2e-5 (3.0e-6 on average), and
  transformers' own in float32 by 1.2e-5 (2.7e-6).
- Decoding sums up the states of recurrent layers token by token, and other passes chunk by chunk: of a tiny Qwen3-Next,
  log-probs of `generate` and `logprobs` differ by up to 3.5e-5 in float32 (120 + 200 tokens; half of them by less than
  5e-7). Both are as far from float64 as transformers' own float32: 1.9e-5, 2.3e-5 and 2.3e-5 (30 + 60 tokens).
- The simulator counts the matrices of recurrent layers as those of any layer, their scans by operations and bytes per
  token from the same trial, and pairs of tokens in layers with attention alone.
- invariant: whether `invariant=true` is possible. ep: whether there are experts in a form that `ep` divides.

{counts}

| family | {columns} |
|---|{lines}|
"""

VISION = """## Families that read images

| family | placeholders of an image | positions | pp | tp | LoRA | value and reward models |
|---|---|---|---|---|---|---|
| gemma3 | as many as the config says, which see one another | of text | yes | yes | yes | yes |
| llava | as many as its tower has patches | of text | yes | yes | yes | yes |
| qwen2_vl, qwen2_5_vl | by the size of the image | by time, height and width | yes | yes | yes | yes |
| qwen3_vl | by the size of the image | by time, height and width | while its first layers, which read images, and the one after them are on one stage | yes | yes | yes |

`tests/images` measures these with a tiny random model of each, against plain transformers: log-probs and gradients to
1e-5, greedy responses token by token, and weights after loading bitwise, with dp, tp, pp, vpp and zero on two ranks;
value and reward models likewise; log-probs in bfloat16; adapters as PEFT reads them; for qwen2_5_vl also a program with
SFT, PPO, a value and a reward model on six placements. cp, `invariant` and Megatron are refused.
Adapters are on the language model. A value or reward model is saved with its tower; transformers has a class that reads
it for gemma3 only.
Gemma's cutting of large images into several (`do_pan_and_scan`) is refused. All other families with images are, too, by
name (RL0303). [Images](howto/images.md) says how to train on them.

"""  # measured by tests/images, which it names


def page(rows: dict[str, dict[str, str]]) -> str:
    import transformers

    ran = {f: r for f, r in rows.items() if "unbuilt" not in r}
    both = [f for f, r in ran.items() if all(r.get(c) == YES for c in ("log-probs", "train", "dp", "pp"))]
    tp = [f for f, r in ran.items() if r.get("tp") == YES]
    counts = (f"{len(rows)} of {len(architectures())} architectures; {len(ran)} are built here; of these {len(both)} "
              f"({100 * len(both) // max(1, len(ran))} %) have yes in log-probs, train, dp and pp, "
              f"and {len(tp)} in tp.")
    noise = ", ".join(f"{family} ({limit:.0e})" for family, limit in NOISE.items())
    text = HEAD.format(version=transformers.__version__, counts=counts, limit=LIMIT, noise=noise, named=len(NAMED),
                       columns=" | ".join(COLUMNS),
                       lines="|".join("---" for _ in COLUMNS))
    for family, r in sorted(ran.items()):
        cells = [r.get("why", "")] + [""] * (len(COLUMNS) - 1) if "why" in r else [r.get(c, "") for c in COLUMNS]
        text += f"| {family} | " + " | ".join(c.replace("|", "/").replace("\n", " ") for c in cells) + " |\n"
    text += f"\n{VISION}## Not built here\n\n" + "".join(
        f"- {f}: {textwrap.shorten(r['unbuilt'], 90)}\n" for f, r in sorted(rows.items()) if "unbuilt" in r)
    return text


def main(path: str, names: Iterable[str]) -> None:
    warnings.filterwarnings("ignore")
    rows = {}
    for family in list(names) or architectures():
        rows[family] = row(family)
        print(family, {k: v for k, v in rows[family].items() if v not in (YES, NO)}, flush=True)
        Path(path).write_text(page(rows))


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    main(sys.argv[1], sys.argv[2:])
