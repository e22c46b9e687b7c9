"""What an adapter uses of its host engine, declared once: checked at the host's start, and in wheels by their sources.

Each adapter has a module of these declarations that imports no host engine. The names that it imports need none.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field

EITHER = "|"  # between names of one thing in several versions


@dataclass(frozen=True, slots=True)
class Uses:
    """What an adapter uses of one class or one module. A name such as `prefix_len|prefix_indices` is either of them."""

    where: str  # "package.module:Class", or "package.module"
    attributes: tuple[str, ...] = ()  # of the class's instances, or of the module
    methods: Mapping[str, Set[str]] = field(default_factory=dict)  # parameters that each must take
    also_in: tuple[str, ...] = ()  # modules whose classes have the rest of the attributes

    @property
    def name(self) -> str:
        """Of the class or module, without the package."""
        return self.where.rpartition(":")[2].rpartition(".")[2]

    def missing_methods(self, owner: object) -> Iterator[str]:
        """What this class or module lacks, as messages name it."""
        for name, parameters in self.methods.items():
            found = [getattr(owner, one) for one in name.split(EITHER) if hasattr(owner, one)]
            if not found or not parameters <= set(inspect.signature(found[0]).parameters):
                yield f"{self.name}.{name}({', '.join(sorted(parameters))})"

    def missing_attributes(self, holder: object) -> Iterator[str]:
        """What this object lacks. Of a class, its annotations count too."""
        for name in self.attributes:
            if not any(_has(holder, one) for one in name.split(EITHER)):
                yield f"{self.name}.{name}"


def _has(holder: object, name: str) -> bool:
    if hasattr(holder, name):
        return True
    return isinstance(holder, type) and any(name in inspect.get_annotations(base) for base in holder.__mro__)
