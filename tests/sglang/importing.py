"""Imports SGLang from its wheel, unpacked at $EVENFLOW_SGLANG, where neither its kernels nor a GPU are present.

The few modules that its scheduler imports and a test on a CPU never calls are stood in for.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
import warnings
from typing import Any
from unittest.mock import MagicMock

VARIABLE = "EVENFLOW_SGLANG"
_STUBBED = ("IPython", "gguf", "torchvision", "triton")


class _AnyClass(type):
    """A class with every attribute: some are looked up when a module is imported."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        is_stubbed = name.split(".")[0] in _STUBBED
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_stubbed else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []

        def attribute(name: str) -> Any:
            if name == "__version__":
                return "3.5.0"
            if name.startswith("__") or name in ("runtime", "driver"):  # without these, triton has no device
                raise AttributeError(name)
            value: Any = MagicMock(name=name)
            if name[0].isupper():
                value = _AnyClass(name, (), {"__init__": lambda self, *args, **kwargs: None})
            setattr(module, name, value)
            return value

        module.__getattr__ = attribute  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        return


def prepare() -> None:
    """Make `import sglang` work."""
    from transformers import AutoConfig

    register = AutoConfig.register
    # Its transformers is older than the one here, which knows some of the models that SGLang adds.
    AutoConfig.register = staticmethod(lambda kind, config, **_: register(kind, config, exist_ok=True))
    orjson = types.ModuleType("orjson")
    orjson.loads, orjson.dumps = json.loads, lambda value: json.dumps(value).encode()  # type: ignore[attr-defined]
    sys.modules.setdefault("orjson", orjson)
    sys.meta_path.append(_Finder())  # behind all others: only what is missing is stubbed
    sys.path.insert(0, os.environ[VARIABLE])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import sglang.srt.managers.scheduler  # noqa: F401
