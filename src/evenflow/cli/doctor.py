"""`evenflow doctor`: what this machine has to run on. Loads no model and uses no network."""

from __future__ import annotations

import os
import platform

from rich.table import Table

from evenflow import __version__
from evenflow.advisor.vllm_flags import installed_version
from evenflow.cli.options import JsonTarget
from evenflow.cli.output import text_console, write_json
from evenflow.config import GIB
from evenflow.host import available_memory, cache_folder, total_memory
from evenflow.model.default_model import SMOLLM2_135M

_PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "gguf", "jinja2", "typer", "rich")


def doctor(*, json: JsonTarget = None) -> None:
    """Show versions, cores, memory, CPU kernels and the default model."""
    model = cache_folder() / SMOLLM2_135M.file_name
    found = {
        "evenflow": __version__,
        "python": platform.python_version(),
        **{name: installed_version([name]) for name in _PACKAGES},
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(total_memory() / GIB, 1),
        "available_memory_gib": round(available_memory() / GIB, 1),
        "native_kernels": _native_kernels(),
        "default_model": str(model) if model.is_file() else "not fetched yet: the first use fetches it",
    }
    table = Table("what", "found", show_header=False)
    for name, value in found.items():
        table.add_row(name.replace("_", " "), "not installed" if value is None else str(value))
    text_console(json).print(table)
    write_json(json, found)


def _native_kernels() -> str | None:
    """Compiles the kernels if that has not been done yet, as the first step would."""
    if installed_version(["torch"]) is None:
        return None
    from evenflow.native.build import why_unavailable

    reason = why_unavailable()
    return "used" if reason is None else f"not used: {reason}"
