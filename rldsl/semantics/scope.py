"""Name resolution. In: a module and what blocks bind. Out: what a name stands for."""

from __future__ import annotations

from dataclasses import dataclass, field

from rldsl.semantics.values import Meaning, Module


@dataclass(slots=True)
class Scope:
    """The visible names: those of this block, of the enclosing ones, then of the module."""

    module: Module  # the file
    parent: Scope | None = None  # of the enclosing block
    names: dict[str, Meaning] = field(default_factory=dict)  # bound in this block

    def find(self, name: str) -> Meaning | None:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.parent
        return self.module.names.get(name)

    def known(self) -> set[str]:
        return set(self.names) | (self.parent.known() if self.parent else set(self.module.names))
