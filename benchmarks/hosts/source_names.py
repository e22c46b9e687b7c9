"""What a package's classes and modules have, by their sources alone: nothing of the package is imported."""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import chain

from evenflow.hosts.uses import EITHER, Uses

Read = Callable[[str], str | None]  # a file of the package, by its path
_PARSING = threading.Lock()  # Python 3.11 cannot parse in several threads
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Names:
    """Of a module, or of a class with all that it inherits. Functions with their parameters."""

    attributes: set[str] = field(default_factory=set)
    functions: dict[str, set[str]] = field(default_factory=dict)

    def __or__(self, other: Names) -> Names:
        """The other's where both have a function."""
        return Names(self.attributes | other.attributes, self.functions | other.functions)

    def has(self, name: str) -> bool:
        return name in self.attributes or name in self.functions


class Package:
    """The sources of one release."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._folders: set[str] = set()  # modules that are an __init__.py
        self.module = cache(self._parse)
        self.class_names = cache(self._class_names)

    def missing(self, uses: Uses) -> Iterator[str]:
        """What an adapter uses and the package lacks, as the adapter's refusal names it."""
        names = self._names(uses.where)
        if names is None:
            yield uses.where
            return
        for module in uses.also_in:
            names |= self._of_all_classes(module)
        for name, parameters in uses.methods.items():
            found = [names.functions[one] for one in name.split(EITHER) if one in names.functions]
            if not found or not parameters <= found[0]:
                yield f"{uses.name}.{name}({', '.join(sorted(parameters))})"
        for name in uses.attributes:
            if not any(names.has(one) for one in name.split(EITHER)):
                yield f"{uses.name}.{name}"

    def missing_imports(self, adapter: ast.Module, package: str) -> Iterator[str]:
        """What a module of the adapter imports of the package in vain. Of a `try`, one branch is enough."""
        tries = [node for node in ast.walk(adapter) if isinstance(node, ast.Try)]
        in_tries = {id(one) for node in tries for one in ast.walk(node)}
        yield from self._missing_of(adapter, package, in_tries)
        for node in tries:
            branches = [node.body, *(handler.body for handler in node.handlers)]
            lacking = [list(self._missing_of(ast.Module(body, []), package, set())) for body in branches]
            if all(lacking):
                yield from lacking[0]

    def _missing_of(self, tree: ast.Module, package: str, without: set[int]) -> Iterator[str]:
        for node in ast.walk(tree):
            if id(node) in without or not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            if node.module.partition(".")[0] == package:
                for alias in node.names:
                    if not self._is_importable(node.module, alias.name):
                        yield f"{node.module}.{alias.name}"

    def _is_importable(self, module: str, name: str) -> bool:
        names = self._names(module)
        return (names is not None and names.has(name)) or self.module(f"{module}.{name}") is not None

    # ---- names ----

    def _names(self, where: str) -> Names | None:
        module, _, class_name = where.partition(":")
        if class_name:
            return self.class_names(module, class_name)
        tree = self.module(module)
        if tree is None:
            return None
        names = _top_level_names(tree)
        for origin, name in self._imported_from(tree, module):
            names |= (self._names(origin) if name.name == "*" else None) or Names()
        return names

    def _of_all_classes(self, module: str) -> Names:
        tree, names = self.module(module), Names()
        for node in tree.body if tree is not None else ():
            if isinstance(node, ast.ClassDef):
                names |= _own_names(node)
        return names

    def _class_names(self, module: str, name: str) -> Names | None:
        tree = self.module(module)
        if tree is None:
            return None
        node = next((one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == name), None)
        if node is None:
            origins = ((origin, one.name) for origin, one in self._imported_from(tree, module) if _called(one) == name)
            return next((self.class_names(*origin) for origin in origins), None)
        names = Names()
        for base in reversed(node.bases):
            inherited = self.class_names(module, base.id) if isinstance(base, ast.Name) else None
            names |= inherited or Names()
        return names | _own_names(node)

    def _imported_from(self, tree: ast.Module, module: str) -> Iterator[tuple[str, ast.alias]]:
        """Each imported name, and the module that has it."""
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                parts = module.split(".")
                num_kept = len(parts) - node.level + (module in self._folders)
                above = parts[:num_kept] if node.level else []
                yield from ((".".join([*above, *filter(None, [node.module])]), alias) for alias in node.names)

    def _parse(self, module: str) -> ast.Module | None:
        path = module.replace(".", "/")
        source = self._read(f"{path}.py")
        if source is None and (source := self._read(f"{path}/__init__.py")) is not None:
            self._folders.add(module)
        if source is None:
            return None
        with _PARSING:
            return ast.parse(source)


def _called(alias: ast.alias) -> str:
    return alias.asname or alias.name


def _top_level_names(tree: ast.Module) -> Names:
    """Those of branches too: which one is taken depends on the machine."""
    names = Names()
    for node in _statements(tree.body):
        if isinstance(node, Function):
            names.functions[node.name] = _parameters(node)
        elif isinstance(node, ast.ClassDef):
            names.attributes.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.attributes.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names.attributes.update(_stored(node))
    return names


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            handled = chain.from_iterable(handler.body for handler in getattr(node, "handlers", ()))
            yield from _statements([*node.body, *node.orelse, *handled, *getattr(node, "finalbody", ())])
        else:
            yield node


def _own_names(node: ast.ClassDef) -> Names:
    """What a class's body defines, and what its methods set on `self`."""
    names = Names()
    for statement in _statements(node.body):
        if isinstance(statement, Function):
            names.functions[statement.name] = _parameters(statement)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            names.attributes.update(_stored(statement))
    names.attributes.update(
        one.attr
        for one in ast.walk(node)
        if isinstance(one, ast.Attribute)
        and isinstance(one.ctx, ast.Store)
        and isinstance(one.value, ast.Name)
        and one.value.id == "self"
    )
    return names


def _stored(node: ast.Assign | ast.AnnAssign) -> Iterator[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return (one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name))


def _parameters(node: Function) -> set[str]:
    given = node.args
    return {argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
