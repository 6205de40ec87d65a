"""Models with adapters for tests, and the same by hand on plain transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rldsl.graph import model as g
from rldsl.models.families import describe
from rldsl.placement.lora import split_adapter_parameters
from rldsl.plan.adapter_names import module_of
from rldsl.plan.model import Lora, Model, Optimizer
from rldsl.sharding.boxes import expand_specs
from rldsl.source import SourceFile, Span

NOWHERE = Span(SourceFile("test", ""), 0, 0)


def adapted(path: str, lora: Lora, kind: str = "causal_lm", optimizer: Optimizer | None = None, updates: int = 10,
            dtype: str = "float32", seed: int = 5) -> Model:
    """The plan's record, at home in "L0" where it has an optimizer."""
    family = describe(path, kind)
    own = split_adapter_parameters(g.Model("m", kind, path, optimizer, dtype, NOWHERE, lora), family, seed)
    return Model("m", kind, path, dtype, own.params, family.layers, family.config_digest, "L0" if optimizer else "",
                 optimizer, updates, base=own.base, lora=own.lora)


def make_adapter(directory: Path, base: str, lora: Lora, kind: str = "causal_lm",
                 seed: int = 3) -> dict[str, torch.Tensor]:
    """A directory as PEFT writes it, with random factors (none zero); returns them by the names of parameters."""
    model = adapted(base, lora, kind)
    draw = torch.Generator().manual_seed(seed)
    tensors = {p.name: torch.randn(p.spec.shape, generator=draw) * 0.1 for p in expand_specs(model.params, model.layers)}
    directory.mkdir(parents=True)
    save_file({f"base_model.model.{n}": t for n, t in tensors.items()}, str(directory / "adapter_model.safetensors"))
    (directory / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "r": lora.r, "lora_alpha": lora.alpha, "target_modules": list(model.lora.targets),
        "bias": "none", "modules_to_save": ["score"] if "score.weight" in tensors else None}))
    return tensors


def by_hand(model: Any, factors: dict[str, torch.Tensor], scale: float) -> dict[str, torch.nn.Parameter]:
    """Put adapters on a transformers model; returns their parameters, which alone need gradients."""
    model.requires_grad_(False)
    own = {name: torch.nn.Parameter(t.clone()) for name, t in factors.items() if module_of(name)}
    for name in {module_of(n) for n in own}:
        a, b = own[f"{name}.lora_A.weight"], own[f"{name}.lora_B.weight"]
        model.get_submodule(name).register_forward_hook(
            lambda _, x, y, a=a, b=b: y + scale * (x[0] @ a.T) @ b.T)
    return own
