"""The part of a loss that ranges over the whole vocabulary, which the backend computes where the logits are.

In: a loss's program with values of the entry space of a whole vocabulary. Out: a program without them, in which what
was reduced to tokens is an input, and the arithmetic that gives these inputs. Invariant (the compiler's): inside, there
are only elementwise operators, reductions to tokens, and elementwise operators on their results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rldsl.diag import internal_error
from rldsl.plan.expr import Node, Program, nodes_under
from rldsl.plan.operators import in_family
from rldsl.runtime.backend import OverVocabulary, VocabularyReduction
from rldsl.runtime.interpreter.expression_ops import broadcast, elementwise, evaluate
from rldsl.runtime.interpreter.ragged_index import RaggedIndex


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """Of one program."""

    program: Program  # the whole loss
    rest: Program  # what remains, with one input for each of `results`
    inner: tuple[int, ...]  # nodes of the program that the backend computes, in order
    given: tuple[int, ...]  # nodes that these read and that are computed before
    results: tuple[int, ...]  # nodes among `inner` that the rest reads, at level token
    space: str  # the entry space
    frame: str  # its sequences

    def inputs(self, over: OverVocabulary, student: str, teachers: Sequence[str], inputs: Mapping[str, Tensor],
               ragged: RaggedIndex) -> dict[str, Tensor]:
        """The inputs of the rest that stand for `results`. student, teachers: names of inputs of the program, whose
        tables the backend makes. inputs: all others."""
        nodes = self.program.nodes
        tokens = Node("input", level="token", space=self.frame)
        dtype = next((x.dtype for x in inputs.values() if x.is_floating_point() and x.dim()), torch.float32)
        done: dict[int, Tensor] = {}
        for i in sorted(nodes_under(nodes, self.given)):
            if nodes[i].op == "input":
                done[i] = inputs[str(nodes[i].attr("name"))]
                done[i] = done[i].reshape(()) if nodes[i].level == "batch" else done[i]
            else:
                below = nodes[i].args
                done[i] = evaluate(nodes[i], [nodes[a] for a in below], [done[a] for a in below], ragged, dtype)
        given = [broadcast(done[i], nodes[i], tokens, ragged) for i in self.given]

        def terms(logprobs: Tensor, others: Sequence[Tensor], read: Sequence[Tensor],
                  reduce: VocabularyReduction) -> tuple[Tensor, ...]:
            tables = dict(zip((student, *teachers), (logprobs, *others), strict=True))
            values = dict(zip(self.given, read, strict=True))
            for i in self.inner:
                values[i] = self._value(nodes[i], values, tables, reduce, logprobs)
            return tuple(values[i] for i in self.results)

        names = map(input_name, self.results)
        return dict(zip(names, over(terms, given), strict=True))

    def _value(self, node: Node, values: Mapping[int, Tensor], tables: Mapping[str, Tensor],
               reduce: VocabularyReduction, like: Tensor) -> Tensor:
        if node.op == "input":
            return tables[str(node.attr("name"))]
        args = [values[a] for a in node.args]
        if in_family(node.op, "reduction"):
            return reduce(node.op, args[0].to(like.dtype))
        if node.level == "entry":
            levels = [self.program.nodes[a].level for a in node.args]
            args = [x if level == "entry" or not x.dim() else reduce.entries(x)
                    for x, level in zip(args, levels, strict=True)]
        if not in_family(node.op, "elementwise"):
            raise internal_error(f"{node.op} over the vocabulary", "run")
        return elementwise(node.op, args, like.dtype)


def input_name(node: int) -> str:
    return f"over the vocabulary {node}"


def split(program: Program, spaces: Mapping[str, str]) -> VocabularyPart | None:
    """The part of a program over a whole vocabulary; None if there is none. spaces: entry space of a whole vocabulary
    -> its frame."""
    nodes = program.nodes
    tables = {i for i, n in enumerate(nodes) if n.level == "entry" and n.space in spaces}
    if not tables:
        return None
    after = set(tables)  # and all that follows from them
    for i, n in enumerate(nodes):
        if after.intersection(n.args):
            after.add(i)
    reduced = {i for i in after - tables if tables.intersection(nodes[i].args)}
    inner = tables | reduced | (after & nodes_under(nodes, tuple(tables)))
    given = dict.fromkeys(a for i in sorted(inner) for a in nodes[i].args if a not in inner)
    outputs = {i for _, i in program.outputs}
    read = {a for i, n in enumerate(nodes) if i not in inner for a in n.args} | outputs
    results = tuple(sorted((inner - tables) & read))
    numbers: dict[int, int] = {}
    rest: list[Node] = []
    for i, n in enumerate(nodes):
        if i in inner and i not in results:
            continue
        numbers[i] = len(rest)
        rest.append(Node("input", level="token", space=n.space, attrs=(("name", input_name(i)),)) if i in inner else
                    replace(n, args=tuple(numbers[a] for a in n.args)))
    space = nodes[next(iter(tables))].space
    return VocabularyPart(
        program, Program(program.id, tuple(rest), tuple((name, numbers[i]) for name, i in program.outputs), program.at),
        tuple(sorted(inner)), tuple(given), results, space, spaces[space])
