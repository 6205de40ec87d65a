"""What a PEFT directory says of its adapter (github.com/huggingface/peft, LoraConfig as of 0.21).

In: the directory. Out: rank, alpha and targets. An option that may change what the adapter computes is refused, and so
is one that is not known here: to leave it out in silence would give wrong numbers. Errors: RL0342.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rldsl.diag import counted, fail
from rldsl.models import hub_adapters
from rldsl.models.directory import tensor_names, tensor_shapes
from rldsl.models.hub import unasked
from rldsl.plan.adapter_names import CONFIG, TOWERS, WEIGHTS, stored_name
from rldsl.plan.heads import SCORE_WEIGHT
from rldsl.plan.model import Lora
from rldsl.source import Span

PICKLED = "adapter_model.bin"  # of old versions of PEFT: unpickling would execute code of the file
READ = ("peft_type", "r", "lora_alpha", "target_modules")
ABOUT = ("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
         "fan_in_fan_out", "lora_dropout", "runtime_config")  # no matter to what the stored weights compute
IDLE = ("megatron_core", "qalora_group_size", "eva_config", "loftq_config")  # of no effect unless another one is set
# option -> values that change nothing; of all others only these: null, false, [], {}, ""
HARMLESS: dict[str, tuple[Any, ...]] = {
    "exclude_modules": (TOWERS,),  # have no adapters here either
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva"),  # others change the base when it is loaded
}


def read_adapter(path: str, span: Span | None) -> Lora:
    """Its configuration. span: of the program, to be underlined."""
    file = hub_adapters.directory(path, span) / CONFIG
    if not file.is_file():
        raise fail("RL0342", f'no adapter in "{path}"', span, f"{CONFIG} is missing",
                   help="give a directory written by `save` or PEFT, relative to the working directory, or the name of "
                        "an adapter on the Hub: \"owner/name\"", notes=tuple(filter(None, [unasked(path)])))
    try:
        found: dict[str, Any] = json.loads(file.read_text())
        kind, r, alpha = found["peft_type"], int(found["r"]), float(found["lora_alpha"])
        targets = found["target_modules"]
        if not isinstance(targets, str | list):
            raise TypeError(f"target_modules is {json.dumps(targets)}")
        odd = [] if kind == "LORA" else [f"peft_type={kind}"]
        odd += [] if r >= 1 and alpha > 0 else ["r, lora_alpha"]
        odd += _unsupported_options(found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise fail("RL0342", f'the adapter in "{path}" cannot be read', span, f"{type(error).__name__}: {error}",
                   help=f"{CONFIG} is corrupted; copy the directory again") from None
    if odd:
        raise fail("RL0342", f"the type of adapter in \"{path}\" is not supported", span, ", ".join(odd),
                   help="only LoRA with the same rank and alpha for all modules and without biases is supported; if an "
                        f"option in {CONFIG} has no effect on the result, remove it")
    if isinstance(targets, str):
        if targets != "all-linear":
            raise fail("RL0342", f"the type of adapter in \"{path}\" is not supported", span,
                       f"target_modules is a pattern: {targets}", help="list the module names")
        targets = []
    return Lora(r, alpha, tuple(sorted(map(str, targets))), path=path)


def check_weights(path: str, shapes: Mapping[str, tuple[int, ...]], base: str, span: Span | None) -> None:
    """RL0342 for weights that are not there, or that do not fit the base model, whose path is `base`. shapes: of the
    parameters that the adapter has there, by name."""
    directory = hub_adapters.directory(path, span)
    if not (directory / WEIGHTS).is_file():
        if (directory / PICKLED).is_file():
            raise fail("RL0342", f'the adapter in "{path}" is pickled', span, f"there is {PICKLED}, but no {WEIGHTS}",
                       help="load it with PEFT and save it with `save_pretrained`, which writes safetensors")
        raise fail("RL0342", f'the adapter in "{path}" has no weights', span, f"{WEIGHTS} is missing",
                   help="copy the directory again, or save the adapter again")
    stored = tensor_shapes(directory / WEIGHTS, path, span)
    wanted = {stored_name(name): shape for name, shape in shapes.items()}
    if (wrong := next(_misfits(stored, wanted), "")) == "":
        return
    raise fail("RL0342", f'the adapter in "{path}" does not fit the model "{base}"', span, wrong,
               help=f"{other}: give this model, or another adapter" if (other := trained_on(path, base, span)) else
               f"it belongs to another model, or {CONFIG} to another adapter; copy the directory again")


def trained_on(path: str, base: str, span: Span | None) -> str:
    """What PEFT says of the base of an adapter, for messages, if it is another one than `base`."""
    named = json.loads((hub_adapters.directory(path, span) / CONFIG).read_text()).get("base_model_name_or_path")
    return f'the adapter was trained on "{named}", as its {CONFIG} says' if named and named != base else ""


def _misfits(stored: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """What is wrong with the tensors of a file, by name. A score head may lack: it is new then."""
    for name, shape in wanted.items():
        if name in stored and stored[name] != shape:
            yield f"{_module(name)} is {_shown(stored[name])} there, and must be {_shown(shape)}"
    for name in wanted:
        if name not in stored and name != stored_name(SCORE_WEIGHT):
            yield f"{_module(name)} is missing there"
    if more := sorted(stored.keys() - wanted.keys()):
        others = f" and {counted(len(more) - 1, 'other tensor')}" if len(more) > 1 else ""
        yield f"the model has nothing for its {_module(more[0])}{others}"


def _module(name: str) -> str:
    return name.removeprefix(stored_name(""))


def _shown(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "one number"


def check_text_adapter(path: str, span: Span | None) -> None:
    """RL0342 for an adapter on the vision tower of a model that reads images: its weights would be left out."""
    names = (name for name in tensor_names(hub_adapters.directory(path, span), path, span) if ".lora_" in name)
    if other := next((name for name in names if re.match(re.escape(stored_name("")) + TOWERS, name)), ""):
        raise fail("RL0342", f"the type of adapter in \"{path}\" is not supported", span, f"{WEIGHTS} has {other}",
                   help="only the language model of a model that reads images can have adapters")


def _unsupported_options(options: dict[str, Any]) -> Iterator[str]:
    """What is set and not understood. 0 counts as set: it is the number of a layer."""
    for name, value in options.items():
        unset = value is None or value is False or value in ([], {}, "")
        if name == "modules_to_save":
            yield from (f"{name}={x}" for x in value or () if x != SCORE_WEIGHT.partition(".")[0])
        elif not unset and name not in (*READ, *ABOUT, *IDLE) and value not in HARMLESS.get(name, ()):
            yield f"{name}={value if isinstance(value, str) else json.dumps(value)}"[:60]
