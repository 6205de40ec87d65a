"""Whether the models that read rows with images can read images, and the same ones.

In: a graph and families. Out: nothing, or RL0333.
"""

from __future__ import annotations

from collections.abc import Mapping

from rldsl.diag import Diagnostic, Failure, Label
from rldsl.graph import model as g
from rldsl.models.families import Family
from rldsl.models.vision import supported_families
from rldsl.placement.tokenizers import readers_of
from rldsl.plan.processor_files import PROCESSORS
from rldsl.source import Span


def check_images(graph: g.Graph, families: Mapping[str, Family]) -> None:
    """RL0333: a model without a vision tower, or whose image processor is missing, of another model, or not that of
    the other models."""
    with_images = {d.name: d for d in graph.data if dict(d.options).get("images")}
    if not with_images:
        return
    models = {m.name: m for m in graph.models}
    for source, names in readers_of(graph).items():
        if source not in with_images:
            continue
        label = Label(with_images[source].span, "its rows have images")
        for name in names:
            family, first = families[name], families[names[0]]
            if not family.reads_images:
                raise _refused(f"`{name}` cannot read the images of `{source}`", models[name].span,
                               f"{family.name} models read text alone", label,
                               f"families that read images: {supported_families()}; docs/families.md says what each "
                               "of them can do")
            if not family.image_processor:
                raise _refused(f"`{name}` cannot read the images of `{source}`", models[name].span,
                               f'"{family.path}" has neither {" nor ".join(PROCESSORS)}', label,
                               "save the image processor to the directory: "
                               "`AutoImageProcessor.from_pretrained(...).save_pretrained(directory)`")
            if family.image_problem:
                raise _refused(f"`{name}` cannot read the images of `{source}`", models[name].span,
                               f'the image processor of "{family.path}" is not that of its model', label,
                               "copy the files of the model's processor to the directory again",
                               (family.image_problem,))
            if family.image_processor != first.image_processor:
                raise _refused(f"`{names[0]}` and `{name}` read the same images with different image processors",
                               models[name].span, f'the image processor of "{family.path}"',
                               Label(models[names[0]].span, f'differs from that of "{first.path}"'),
                               "an image has as many tokens for one model as for the other only if their "
                               f"{PROCESSORS[0]} are equal")


def _refused(title: str, span: Span, label: str, other: Label, help: str, notes: tuple[str, ...] = ()) -> Failure:
    return Failure([Diagnostic("RL0333", title, span, label, (other,), notes=notes, help=help)])
