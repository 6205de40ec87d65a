"""Options of calls and declarations: one table row for each, checked in one place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rldsl.plan.arrays import MOST_BINS, MOST_ROWS
from rldsl.plan.expr import Scalar
from rldsl.plan.model import OptimizerKind
from rldsl.semantics.errors import BAD, Bad, suggest
from rldsl.semantics.expressions import ExpressionBuilder
from rldsl.semantics.scope import Scope
from rldsl.semantics.terms import Term
from rldsl.semantics.units import differ
from rldsl.source import Span
from rldsl.syntax import ast

Value = Scalar | tuple[Scalar, ...] | None
Kind = Literal["int", "float", "bool", "text", "texts", "floats"]
SHOWN = {"int": "an integer", "float": "a number", "bool": "true or false", "text": "a string",
         "texts": "a string or a list of strings", "floats": "a list of numbers"}


@dataclass(frozen=True, slots=True)
class Opt:
    """One option: its type, its default, and the values that it takes."""

    kind: Kind  # its type
    default: Value = None  # the value if the option is omitted
    low: float = -math.inf  # the smallest value
    high: float = math.inf  # the largest value
    above: bool = False  # the value must be larger than `low`
    below: bool = False  # the value must be smaller than `high`
    choices: tuple[str, ...] = ()  # the words allowed, which may be written without quotes; of a bool: besides it
    needed: bool = False  # has no default
    unit: str = ""  # what it counts; "rows": prompts, sequences or pairs, for the caller to judge

    def range(self) -> str:
        parts = []
        if self.low > -math.inf:
            parts.append(f"more than {self.low:g}" if self.above else f"at least {self.low:g}")
        if self.high < math.inf:
            parts.append(f"less than {self.high:g}" if self.below else f"at most {self.high:g}")
        return " and ".join(parts)


_FRACTION = Opt("float", 0.0, 0, 1)
# of every optimizer
OPTIMIZER = {
    "lr": Opt("float", low=0, needed=True), "weight_decay": Opt("float", 0.0, 0),
    "decay": Opt("text", "all", choices=("all", "matrices")), "warmup": Opt("float", 0.0, 0),
    "schedule": Opt("text", "constant", choices=("constant", "linear", "cosine")), "min_lr_ratio": _FRACTION,
    "clip_grad": Opt("float", 1.0, 0), "freeze": Opt("texts", ()),
}
_ADAM = {"betas": Opt("floats", (0.9, 0.999), 0, 1, below=True), "eps": Opt("float", 1e-8, 0, above=True)}
# the options that one optimizer has besides
OPTIMIZERS: dict[OptimizerKind, dict[str, Opt]] = {
    "adamw": _ADAM,
    "adamw_8bit": _ADAM,
    "sgd": {"momentum": Opt("float", 0.0, 0, 1, below=True), "nesterov": Opt("bool", False)},
    "adafactor": {"beta2_decay": Opt("float", -0.8, high=0), "eps": Opt("float", 1e-3, 0),
                  "clip_threshold": Opt("float", 1.0, 1)},
    "muon": {"momentum": Opt("float", 0.95, 0, 1, below=True), "nesterov": Opt("bool", True),
             "ns_steps": Opt("int", 5, 1, 99),
             "adjust_lr": Opt("text", "original", choices=("original", "match_rms_adamw")),
             "adamw_lr": Opt("float", None, 0, above=True), **_ADAM},
}
GROUP = {"lr_scale": Opt("float", None, 0), "weight_decay": Opt("float", None, 0)}
MODEL = {"dtype": Opt("text", "float32", choices=("float32", "bfloat16")),
         "invariant": Opt("bool", False, choices=("training",))}
LORA = {"r": Opt("int", 8, 1), "alpha": Opt("float", 16.0, 0, above=True), "targets": Opt("texts", ())}
COLUMNS = ("prompt", "answer", "chosen", "rejected")
DATA = {
    "batch": Opt("int", low=1, needed=True, unit="rows"), "max_prompt_tokens": Opt("int", 512, 1, unit="tokens"),
    "max_answer_tokens": Opt("int", 512, 1, unit="tokens"), "shuffle": Opt("bool", True),
    "kind": Opt("text", None, choices=("prompts", "answers", "pairs")), "answers": Opt("int", None, 2),
    "numbers": Opt("texts", ()),
    "over_long": Opt("text", "truncate", choices=("truncate", "drop", "error")),
    "images": Opt("text", None), "max_image_tokens": Opt("int", None, 1, unit="tokens"),
    **{c: Opt("text", c) for c in COLUMNS},
}
HF = {"split": Opt("text", ""), "subset": Opt("text", ""), "streaming": Opt("bool", False)}  # that only `hf` has
TOP = {"k": Opt("int", low=1, needed=True)}
GENERATE = {
    "n": Opt("int", 1, 1, unit="sequences"), "max_new_tokens": Opt("int", 256, 1, unit="tokens"),
    "min_new_tokens": Opt("int", 0, 0, unit="tokens"),
    "temperature": Opt("float", 1.0, 0, above=True), "top_p": Opt("float", 1.0, 0, 1, above=True),
    "top_k": Opt("int", 0, 0), "min_p": Opt("float", 0.0, 0, 1), "greedy": Opt("bool", False), "stop": Opt("texts", ()),
    "per_step": Opt("int", None, 1, unit="tokens"), "lag": Opt("int", None, 0),
}
ENVIRONMENT = {
    "max_turns": Opt("int", 8, 1), "max_tokens": Opt("int", low=2, needed=True, unit="tokens"),
    "turn_timeout": Opt("float", 60.0, 0, above=True), "on_error": Opt("text", "stop", choices=("stop", "end")),
    "branches": Opt("int", 1, 1),
}
TRAIN = {"minibatches": Opt("int", 1, 1), "minibatch": Opt("int", None, 1, unit="rows"), "epochs": Opt("int", 1, 1),
         "shuffle": Opt("bool", True), "nonfinite": Opt("text", "stop", choices=("stop", "skip")),
         "router_bias_update_rate": Opt("float", 0.0, 0, 1)}
TEXT = {"max_tokens": Opt("int", low=1, needed=True, unit="tokens"),
        "over_long": Opt("text", "error", choices=("error", "truncate", "drop"))}
BUFFER = {"capacity": Opt("int", low=1, needed=True, unit="rows")}
PREFIXES = {"at": Opt("text"), "every": Opt("int", None, 1, unit="tokens"), "fractions": Opt("floats"),
            "most": Opt("int", None, 1, unit="rows")}
HISTOGRAM = {"bins": Opt("int", 30, 1, MOST_BINS), "low": Opt("float", None), "high": Opt("float", None)}
TABLE = {"rows": Opt("int", 8, 1, MOST_ROWS)}
CHECKPOINT = {"keep": Opt("int", 2, 1)}
FLOW = {"steps": Opt("int", low=1, needed=True), "seed": Opt("int", 1, 0), "lag": Opt("int", 0, 0)}
CLUSTER = {"nodes": Opt("int", 1, 1, 16_384), "gpus": Opt("int", low=1, high=256, needed=True),
           "memory_gb": Opt("float", 80.0, 1e-9, 1e9)}  # from a byte, as a whole number of 0 bytes would be no limit


def read(table: dict[str, Opt], given: list[tuple[ast.Ident, ast.Expr]], what: str, span: Span,
         exprs: ExpressionBuilder, scope: Scope, others: Sequence[str] = (),
         elsewhere: Mapping[str, str] | None = None) -> dict[str, Value] | Bad:
    """All options of `table`, with their defaults. `what`: whose options they are, for messages. others: names that
    the call has besides, to suggest. elsewhere: names that are no options here -> what to do instead."""
    out: dict[str, Value] = {k: o.default for k, o in table.items()}
    seen: set[str] = set()
    bad = False
    for ident, expr in given:
        name = ident.name
        if not name:
            exprs.errors.add("RL0204", f"the options of {what} must be named", ident.span,
                             help=f"write `option=value`; options: {', '.join(table)}")
            bad = True
            continue
        if name not in table:
            advice = (elsewhere or {}).get(name) or suggest(name, (*table, *others)) or (
                f"options: {', '.join((*table, *others))}")
            exprs.errors.add("RL0107", f"{what} has no option `{name}`", ident.span, help=advice)
            seen.add(getattr(advice, "word", ""))  # then it is not missing, but misspelt
            bad = True
            continue
        if name in seen:
            exprs.errors.add("RL0215", f"`{name}` is passed twice", ident.span, help="remove one of the two")
        seen.add(name)
        option = table[name]
        if isinstance(expr, ast.Name) and expr.name in option.choices and scope.find(expr.name) is None:
            out[name] = expr.name
            continue
        if isinstance(expr, ast.Name) and option.choices and scope.find(expr.name) is None:
            words = (*(("true", "false") if option.kind == "bool" else ()), *option.choices)
            exprs.errors.add("RL0101", f"unknown name `{expr.name}`", expr.span,
                             help=f"`{name}` is one of: {', '.join(words)}")
            out[name], bad = None, True
            continue
        value = exprs.scalar(expr, scope)
        checked = BAD if isinstance(value, Bad) else check(name, option, value, expr.span, exprs)
        if not isinstance(checked, Bad) and option.unit != "rows":
            checked = counts(name, option.unit, unit_of(expr, exprs, scope), expr.span, exprs) or checked
        bad |= isinstance(checked, Bad)
        out[name] = None if isinstance(checked, Bad) else checked
    missing = [k for k, o in table.items() if o.needed and k not in seen]
    if missing:
        exprs.errors.add("RL0215", f"{what} needs `{'`, `'.join(missing)}`", span, help=f"write `{missing[0]}=...`")
    return BAD if bad or missing else out


def unit_of(expr: ast.Expr, exprs: ExpressionBuilder, scope: Scope) -> str:
    """The unit of a sound constant expression."""
    terms = [exprs.build(e, scope) for e in (expr.items if isinstance(expr, ast.ListOf) else (expr,))]
    return next((t.unit.word for t in terms if isinstance(t, Term) and t.unit.word), "")


def given_unit(name: str, given: list[tuple[ast.Ident, ast.Expr]], exprs: ExpressionBuilder,
               scope: Scope) -> tuple[str, Span] | None:
    """The unit with which the option `name` was given, and where; None where it has none."""
    found = [(unit_of(e, exprs, scope), e.span) for i, e in given if i.name == name]
    return found[0] if found and found[0][0] else None


def counts(name: str, unit: str, given: str, span: Span, exprs: ExpressionBuilder) -> Bad | None:
    """RL0218 where an option that counts `unit` ("": a plain number) is given in another. None where it fits."""
    if not differ(given, unit) and not (given and not unit):
        return None
    title = f"`{name}` counts {unit}, not {given}" if unit else f"`{name}` is a plain number, not a number of {given}"
    help_ = f"give it in {unit}, or without a unit" if unit else "remove the unit"
    if name == "minibatches":
        help_ = f"this is the number of minibatches; for their size write `minibatch={span.text}`"
    return exprs.errors.add("RL0218", title, span, f"this is in {given}", help=help_)


def positive_integer(word: str, tree: ast.Expr, exprs: ExpressionBuilder, scope: Scope, unit: str = "") -> int | None:
    """The number after `every`, `repeat` or `max`: an integer of at least 1; None after an error. unit: what it counts;
    "": a plain number."""
    value = exprs.constant(tree, scope)
    if isinstance(value, Bad) or counts(word, unit, value.unit.word, tree.span, exprs):
        return None
    if type(value.value) is not int or value.value < 1:
        exprs.errors.add("RL0205", f"`{word}` must be an integer of at least 1", tree.span,
                         f"this is {shown(value.value)}")
        return None
    return value.value


def shown(value: Value) -> str:
    """A constant as one writes it in a program: true, "x", [0.9, 0.99]."""
    if isinstance(value, tuple):
        return f"[{', '.join(shown(v) for v in value)}]"
    if isinstance(value, str):
        return f'"{value}"'
    return str(value).lower() if isinstance(value, bool) else repr(value)


def check(name: str, option: Opt, value: Scalar | tuple[Scalar, ...], span: Span,
          exprs: ExpressionBuilder) -> Value | Bad:
    """One value against its row: type, then range or choice."""
    typed = value if isinstance(value, str) and value in option.choices else _typed(option.kind, value)
    if isinstance(typed, Bad):
        also = "".join(f", or {choice}" for choice in option.choices)
        return exprs.errors.add("RL0205", f"`{name}` must be {SHOWN[option.kind]}{also}", span,
                                f"this is {shown(value)}",
                                help=f"write `{name}=true`{also and f' or `{name}={option.choices[-1]}`'}"
                                if option.kind == "bool" else "")
    if option.choices and option.kind != "bool" and typed not in option.choices:
        return exprs.errors.add("RL0205", f"`{name}` cannot be {shown(value)}", span,
                                help=f"one of: {', '.join(option.choices)}")
    if option.kind == "floats" and name == "betas" and isinstance(typed, tuple) and len(typed) != 2:
        return exprs.errors.add("RL0205", "`betas` must be two numbers", span, f"this is {shown(typed)}",
                                help="write `betas=[0.9, 0.999]`")
    for number in typed if isinstance(typed, tuple) else (typed,):
        if isinstance(number, (int, float)) and not isinstance(number, bool):
            low = number > option.low if option.above else number >= option.low
            high = number < option.high if option.below else number <= option.high
            if not (low and high):
                hint = "write `greedy=true` to take the most likely token" if name == "temperature" else ""
                return exprs.errors.add("RL0205", f"`{name}` must be {option.range()}", span, f"this is {number:g}",
                                        help=hint)
    return typed


def _typed(kind: Kind, value: Scalar | tuple[Scalar, ...]) -> Value | Bad:
    if kind in ("int", "float"):
        if isinstance(value, bool) or not isinstance(value, int | float):
            return BAD
        if kind == "float":
            return float(value)
        return int(value) if isinstance(value, int) or value.is_integer() else BAD
    if kind == "bool":
        return value if isinstance(value, bool) else BAD
    if kind == "text":
        return value if isinstance(value, str) else BAD
    items = value if isinstance(value, tuple) else (value,)
    parts = [_typed("text" if kind == "texts" else "float", i) for i in items]
    found = tuple(p for p in parts if isinstance(p, int | float | str))
    return found if len(found) == len(parts) else BAD
