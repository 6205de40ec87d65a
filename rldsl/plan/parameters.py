"""The parameters of a model: how tensor parallelism divides each, which optimizer changes them, and adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StageKind = Literal["first", "layer", "last", "ends", "all"]  # which pipeline stages hold a parameter


@dataclass(frozen=True, slots=True)
class Split:
    """How tensor parallelism divides a parameter."""

    dim: int  # that is divided
    # (units, unit size). A fused tensor has several parts one after the other, each divided on its own. A unit (an
    # attention head, a row) is never cut; with fewer units than tp, neighboring ranks hold the same unit
    parts: tuple[tuple[int, int], ...]


PACKED = ("_blocks", "_scales")  # how the names of the two stored tensors of an MXFP4 parameter end


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A parameter, or one per layer when `name` contains "{}"."""

    name: str  # dotted, as in the module; "{}" stands for the layer
    shape: tuple[int, ...]  # global
    # the pipeline stages that hold it. layer: that of its layer; ends: first and last, for tied embeddings
    stage: StageKind = "all"
    layers: int = 0  # how many there are; 0 without "{}"
    split: Split | None = None  # None: every rank of a tensor-parallel group holds all of it
    # the HF tensor-parallel style of its module: colwise, rowwise, replicated, vocab, head, or experts. The backend
    # chooses its collectives by it
    style: str = "replicated"
    # with tp > 1 each rank computes only a part of its gradient, though it holds the whole tensor
    partial_grad: bool = False
    experts: int = 0  # that dimension 0 counts; 0: not an expert's parameter
    # the tensors of the model's directory that make it up, if not one of the same name. With "{expert}" there is one
    # per expert, and several are joined along dimension 1 of the parameter; else several are equal runs of its rows
    stored: tuple[str, ...] = ()
    layer: int = -1  # the layer of a parameter that not all layers have alike, whose name has its number; -1: none
    # no optimizer changes it: the module has a buffer of this name, which a checkpoint holds, or asks for no gradient
    buffer: bool = False
    # stored in float32 in models of half precision, too, since transformers does so (`sharding/dtypes.py`)
    float32: bool = False
    # models of half precision multiply with it in float32, too, with an input of float32: in their routers
    float32_product: bool = False

    def __hash__(self) -> int:
        """Cheap, as that of a layout."""
        return hash((self.name, self.shape))

    def layer_numbers(self, layers: int) -> tuple[int, ...]:
        """Numbers of the layers that have it; () if it belongs to none. layers: how many the model has."""
        if self.stage != "layer":
            return ()
        return (self.layer,) if self.layer >= 0 else tuple(range(self.layers or layers))


OptimizerKind = Literal["adamw", "adamw_8bit", "sgd", "adafactor", "muon"]


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """Options of the parameters with certain names, in place of those of the whole optimizer."""

    patterns: tuple[str, ...]  # shell patterns of dotted names; one has to match
    lr_scale: float | None = None  # multiplies the learning rate; None: as without this group
    weight_decay: float | None = None  # None: as without this group


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer, its options, and the schedule of its learning rate. AdamW is that of Loshchilov & Hutter 2019 (with
    8-bit state, of Dettmers et al. 2022), Adafactor that of Shazeer & Stern 2018 without a first moment, Muon that of
    Jordan et al. 2024."""

    lr: float  # peak learning rate
    betas: tuple[float, float] = (0.9, 0.999)  # AdamW: decay of the first and the second moment
    # AdamW: added to the root of the second moment. Adafactor: the smallest root mean square of a parameter that scales
    # its updates
    eps: float = 1e-8
    weight_decay: float = 0.0  # per unit of learning rate; of SGD added to the gradient
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # of the learning rate, after the warmup
    warmup: float = 0.0  # optimizer steps (>= 1), or a fraction of those of the run (< 1)
    min_lr_ratio: float = 0.0  # the final learning rate, as a fraction of `lr`
    clip_grad: float = 1.0  # largest global 2-norm of the gradient; 0: off
    kind: OptimizerKind = "adamw"  # which one
    momentum: float = 0.0  # SGD, Muon: decay of the gradient's running mean
    nesterov: bool = False  # SGD, Muon: whether the momentum is Nesterov's
    beta2_decay: float = -0.8  # Adafactor: the second moment of update t has the weight t ** beta2_decay
    clip_threshold: float = 1.0  # Adafactor: largest root mean square of an update, before it is scaled
    ns_steps: int = 5  # Muon: Newton-Schulz iterations
    adjust_lr: Literal["original", "match_rms_adamw"] = "original"  # Muon: how the shape of a matrix scales its updates
    adamw_lr: float = 0.0  # Muon: peak learning rate of what AdamW updates; 0: `lr`
    decay: Literal["all", "matrices"] = "all"  # which parameters decay: "matrices" leaves out biases and norms
    groups: tuple[ParamGroup, ...] = ()  # later ones win
    freeze: tuple[str, ...] = ()  # shell patterns of the parameters that are not trained


@dataclass(frozen=True, slots=True)
class Lora:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): a module that computes W x computes W x + alpha / r * B A x
    instead, with A [r, in] and B [out, r]."""

    r: int  # rank
    alpha: float  # the scale is alpha / r
    targets: tuple[str, ...]  # ends of the dotted names of the modules that have an adapter
    seed: int = 0  # from which A is drawn; B starts at zero
    path: str = ""  # the PEFT directory to start from instead; "": none
    transposed: bool = False  # the family stores weights as [in, out]
