"""Whose the names are that a task's tests use: the task's own, Python's, or the answer's.

An answer that defines `abs`, `math` or a helper of the task anew does not change what its tests mean by them.
"""

from __future__ import annotations

import ast
import builtins
import symtable
import sys
from collections import defaultdict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TaskNames:
    """`names` are asked of the answer, and `built_ins` if they are all that the tests use."""

    names: list[str]
    built_ins: list[str]
    modules: dict[str, list[str]]  # of Python's library, with the attributes that the tests use
    helpers: list[str]  # the task's own imports and functions, as source
    declared: list[str]  # classes, by the task's own part of the program
    classes: list[str]  # by their names, which begin with a capital letter, and by how the tests use them


def task_names(prefix: str, tests: str) -> TaskNames:
    declared = _parsed(prefix)
    used = sorted(_unbound(symtable.symtable(tests, "tests.py", "exec")))
    tree = ast.parse(tests)
    modules, values = _modules(tree, used), _compared_with_data(tree)
    built_ins = [name for name in used if hasattr(builtins, name)]
    names = [name for name in used if name not in modules and name not in built_ins]
    return TaskNames(
        names=names,
        built_ins=built_ins if not names else [],
        modules=modules,
        helpers=[ast.unparse(node) for node in _helpers(declared)],
        declared=[node.name for node in declared if isinstance(node, ast.ClassDef)],
        classes=[name for name in names if name[0].isupper() and name not in values],
    )


def _unbound(module: symtable.SymbolTable) -> set[str]:
    """Names that are read and that the tests themselves do not define."""
    read, defined, waiting = set[str](), set[str](), [module]
    while waiting:
        scope = waiting.pop()
        waiting += scope.get_children()
        for symbol in scope.get_symbols():
            if scope is module or symbol.is_global():
                if symbol.is_referenced():
                    read.add(symbol.get_name())
                if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace():
                    defined.add(symbol.get_name())
    return read - defined


def _modules(tests: ast.Module, used: list[str]) -> dict[str, list[str]]:
    """A module's name is only ever followed by a dot."""
    num_uses, attributes = defaultdict[str, int](int), defaultdict[str, list[str]](list)
    for node in ast.walk(tests):
        if isinstance(node, ast.Name):
            num_uses[node.id] += 1
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            attributes[node.value.id].append(node.attr)
    names = [name for name in used if name in sys.stdlib_module_names]
    return {name: sorted(attributes[name]) for name in names if num_uses[name] == len(attributes[name])}


def _compared_with_data(tests: ast.Module) -> set[str]:
    """Names of functions whose results are operands beside plain data: `Split([1, 2]) == [1]`, `3 in Extract(x)`."""
    found = set[str]()
    for node in ast.walk(tests):
        operands = []
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.BinOp):
            operands = [node.left, node.right]
        called = [one.func.id for one in operands if isinstance(one, ast.Call) and isinstance(one.func, ast.Name)]
        if any(not _makes_objects(one) for one in operands):
            found.update(called)
    return found


def _makes_objects(node: ast.expr) -> bool:
    return any(
        isinstance(one, ast.Call) and isinstance(one.func, ast.Name) and one.func.id[0].isupper()
        for one in ast.walk(node)
    )


def _parsed(prefix: str) -> list[ast.stmt]:
    """It may end in the middle of a statement, which the answer goes on with."""
    for ending in ("", " pass", "\n    pass"):
        try:
            return ast.parse(prefix + ending).body
        except (SyntaxError, ValueError):
            continue
    return []


def _helpers(declared: list[ast.stmt]) -> list[ast.stmt]:
    """Imports, and functions that are complete: not the last one, which the answer goes on with or writes anew.

    Functions beside classes may make or take objects of them, which are in the answer's process.
    """
    has_classes = any(isinstance(node, ast.ClassDef) for node in declared)
    return [
        node
        for place, node in enumerate(declared)
        if isinstance(node, ast.Import | ast.ImportFrom)
        or (isinstance(node, ast.FunctionDef) and place < len(declared) - 1 and not has_classes and not _is_stub(node))
    ]


def _is_stub(function: ast.FunctionDef) -> bool:
    return all(
        isinstance(node, ast.Pass | ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in function.body
    )
