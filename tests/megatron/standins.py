"""Stand-ins for packages of kernels, with the signatures that megatron-core 0.16 and this backend call and sums in
plain torch: Transformer Engine 2.9, Apex's extension, flash-attn 2.8. They compute what the real ones promise, and
refuse what those refuse; no real one has run here."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import nn

CALLS: dict[str, list[Any]] = {}


def note(name: str, call: Any) -> None:
    CALLS.setdefault(name, []).append(call)


def module(name: str, **contents: Any) -> ModuleType:
    """Put into sys.modules, and into the package around it."""
    made = ModuleType(name)
    made.__spec__, made.__path__ = ModuleSpec(name, None, is_package=True), []
    vars(made).update(contents)
    sys.modules[name] = made
    around, _, own = name.rpartition(".")
    if around:
        setattr(sys.modules[around], own, made)
    return made


def install(*titles: str) -> None:
    for title in titles:
        {"Transformer Engine": engine, "Apex": apex, "flash-attn": flash}[title]()


def forget(*roots: str) -> None:
    """So that the next import finds what is there then."""
    for name in [m for m in sys.modules if any(m == r or m.startswith(f"{r}.") for r in roots)]:
        del sys.modules[name]


# ----------------------------------------------------------------------------------------------- Transformer Engine


class Product(torch.autograd.Function):
    """x @ weight.T. fused: the weight's gradient goes to its `main_grad`; first: instead of what was there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, fused: bool, first: bool):
        ctx.save_for_backward(x, weight.to(dtype))
        ctx.weight, ctx.fused, ctx.first = weight, fused, first
        return x.to(dtype) @ weight.to(dtype).T

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor):
        x, weight = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):
            own = slope.flatten(0, -2).T.float() @ x.flatten(0, -2).float()
            back = slope @ weight
        if not ctx.fused:
            return back, own, None, None, None
        with torch.no_grad():
            (ctx.weight.main_grad.copy_ if ctx.first else ctx.weight.main_grad.add_)(own)
        return back, None, None, None, None


class Base(nn.Module):
    def dtype(self, x: torch.Tensor) -> torch.dtype:
        if torch.is_autocast_enabled("cpu"):
            return torch.get_autocast_dtype("cpu")
        assert all(p.dtype == x.dtype for p in self.parameters()), "Data types for parameters must match"
        return x.dtype

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        pass


class Linear(Base):
    def __init__(self, in_features: int, out_features: int, sequence_parallel: bool = False,
                 fuse_wgrad_accumulation: bool = False, tp_group: Any = None, tp_size: int = 1,
                 get_rng_state_tracker: Any = None, init_method: Any = None, bias: bool = True,
                 return_bias: bool = False, params_dtype: Any = None, parallel_mode: str | None = None,
                 device: Any = "cuda", rng_tracker_name: str | None = None):
        super().__init__()
        self.mode, self.group, self.fused = parallel_mode, tp_group, fuse_wgrad_accumulation
        self.return_bias = return_bias
        self.size = tp_group.size() if tp_group is not None else tp_size
        self.sequence, self.use_bias = sequence_parallel and self.size > 1, bias
        out = out_features // (self.size if parallel_mode == "column" else 1)
        self.weight = nn.Parameter(torch.empty(
            out, in_features // (self.size if parallel_mode == "row" else 1), dtype=params_dtype, device=device))
        self.bias: Any = torch.Tensor()
        if bias:
            self.bias = nn.Parameter(torch.empty(out, dtype=params_dtype, device=device))
        note("Linear", (parallel_mode, str(device), fuse_wgrad_accumulation, self.sequence))

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        from megatron.core.tensor_parallel import mappings

        assert self.size == 1 or self.sequence, "tokens are divided wherever layers are"
        dtype = self.dtype(x)
        note("products", (self.mode, is_first_microbatch, dtype))
        x = x.to(dtype)
        if self.mode == "column" and self.sequence:
            x = mappings.gather_from_sequence_parallel_region(x, group=self.group)
        out = Product.apply(x, self.weight, dtype, self.fused, bool(is_first_microbatch))
        if self.mode == "row" and self.sequence:
            out = mappings.reduce_scatter_to_sequence_parallel_region(out, group=self.group)
        if self.use_bias and not self.return_bias:
            out = out + self.bias.to(dtype)
        return (out, self.bias.to(dtype)) if self.return_bias else out


class GroupedLinear(Base):
    def __init__(self, num_gemms: int, in_features: int, out_features: int, sequence_parallel: bool = False,
                 fuse_wgrad_accumulation: bool = False, tp_group: Any = None, tp_size: int = 1,
                 get_rng_state_tracker: Any = None, rng_tracker_name: str | None = None, init_method: Any = None,
                 bias: bool = True, return_bias: bool = False, params_dtype: Any = None,
                 parallel_mode: str | None = None, device: Any = "cuda", ub_name: str | None = None):
        super().__init__()
        assert tp_size == 1 and not bias
        self.num_gemms, self.fused = num_gemms, fuse_wgrad_accumulation
        for i in range(num_gemms):
            setattr(self, f"weight{i}", nn.Parameter(torch.empty(
                out_features, in_features, dtype=params_dtype, device=device)))
        note("GroupedLinear", (num_gemms, str(device), fuse_wgrad_accumulation))

    def forward(self, x: torch.Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> torch.Tensor:
        dtype = self.dtype(x)
        note("grouped", (len(m_splits), is_first_microbatch, dtype))
        parts = x.to(dtype).split(m_splits)
        return torch.cat([Product.apply(part, getattr(self, f"weight{i}"), dtype, self.fused, bool(is_first_microbatch))
                          for i, part in enumerate(parts)])


class Other(nn.Module):
    """What megatron-core derives from when it is imported, and is not taken."""

    def __init__(self, *_: Any, **__: Any):
        raise AssertionError("not a module of this backend")


def engine() -> None:
    module("transformer_engine", __version__="2.9.0+standin")
    module("transformer_engine.common")
    module("transformer_engine.common.recipe", DelayedScaling=type("DelayedScaling", (), {}))
    module("transformer_engine.pytorch", Linear=Linear, GroupedLinear=GroupedLinear, LayerNormLinear=Other,
           DotProductAttention=Other, RMSNorm=Other, LayerNorm=Other)
    module("transformer_engine.pytorch.tensor", QuantizedTensor=type("QuantizedTensor", (), {}))
    module("transformer_engine.pytorch.ops", __getattr__=lambda name: Other)
    module("transformer_engine.pytorch.fp8", FP8GlobalStateManager=Other, fp8_autocast=None)
    module("transformer_engine.pytorch.distributed", activation_recompute_forward=None, checkpoint=None,
           CudaRNGStatesTracker=type("CudaRNGStatesTracker", (), {}), get_all_rng_states=dict)
    module("transformer_engine.pytorch.router", fused_compute_score_for_moe_aux_loss=None, fused_moe_aux_loss=None,
           fused_topk_with_score_function=None)
    module("transformer_engine.pytorch.module")
    module("transformer_engine.pytorch.module.base", get_dummy_wgrad=None)


# ----------------------------------------------------------------------------------------------- Apex and flash-attn


def add_gradient(total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    assert total_input.dim() == grad_output.dim() == 2 and main_grad.dtype == torch.float32
    assert total_input.dtype == grad_output.dtype, "the extension reads both as one dtype"
    note("gradients", total_input.dtype)
    with torch.autocast("cpu", enabled=False), torch.no_grad():
        main_grad.add_(grad_output.T.float() @ total_input.float())


def apex() -> None:
    module("apex")
    module("fused_weight_gradient_mlp_cuda", wgrad_gemm_accum_fp32=add_gradient)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
           max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
           causal: bool = False, window_size: tuple[int, int] = (-1, -1), deterministic: bool = False) -> torch.Tensor:
    """q: [T, H, D]; k, v: [R, K, D]. The last query of a sequence sees its last key."""
    assert softmax_scale is not None and causal and q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    found = []
    for edges, most, rows in ((cu_seqlens_q, max_seqlen_q, len(q)), (cu_seqlens_k, max_seqlen_k, len(k))):
        assert edges.dtype == torch.int32 and edges[0] == 0 and edges[-1] == rows and most >= edges.diff().max()
        found.append(edges.diff().tolist())
    note("attention", (q.dtype, softmax_scale, window_size, found))
    queries, keys, values = (x.transpose(0, 1).split(n, 1) for x, n in zip((q, k, v), (found[0], *[found[1]] * 2)))
    out = []
    for one, seen, worth in zip(queries, keys, values):
        seen, worth = (x.repeat_interleave(q.shape[1] // k.shape[1], 0) for x in (seen, worth))
        gap = torch.arange(one.shape[1])[:, None] + seen.shape[1] - one.shape[1] - torch.arange(seen.shape[1])
        hidden = gap < 0 if window_size[0] < 0 else (gap < 0) | (gap > window_size[0])
        scores = (one @ seen.transpose(1, 2) * softmax_scale).masked_fill(hidden, -torch.inf)
        out.append((scores.softmax(-1).to(worth.dtype) @ worth).transpose(0, 1))
    return torch.cat(out)


def flash() -> None:
    module("flash_attn", __version__="2.8.3", flash_attn_varlen_func=attend, flash_attn_with_kvcache=None)
