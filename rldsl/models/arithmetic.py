"""Families that would not compute here what they compute in transformers.

In: the skeleton of a model and its config. Out: nothing, or RL0303 that says why the family is refused. Everything
else that transformers calls a causal language model runs its own code.
"""

from __future__ import annotations

from typing import Any

from rldsl.diag import fail
from rldsl.models.skeleton import Skeleton
from rldsl.source import Span

HELP = "the page on model families says which ones run: docs/families.md"


def check(skeleton: Skeleton, config: Any, path: str, span: Span | None) -> None:
    if why := _problem(skeleton, str(config.model_type)):
        raise fail("RL0303", f'the family {config.model_type} of "{path}" is not supported', span, why, help=HELP)


# families that transformers calls causal language models, whose numbers would be others here -> why
OTHERS = {
    "cpmant": "it reads a prompt in both directions",
    "inkling_text": "its layers look at earlier tokens in a form that is not known here",
    "inkling2_text": "its layers look at earlier tokens in a form that is not known here",
    "jetmoe": "what it decodes differs from what it computes of whole sequences",
    "prophetnet": "it predicts several tokens at once",
    "xlm": "its attention is not causal",
    "xlnet": "its attention is not causal",
}


def _problem(skeleton: Skeleton, family: str) -> str:
    if family in OTHERS:
        return OTHERS[family]
    kept = next((name for name, _, floating in skeleton.buffers if not floating), "")
    return f"it has the buffer {kept}, which holds no floating-point numbers" if kept else ""
