"""`evenflow doctor`: what is installed, what works on this machine, and what to do about the rest.

Uses no network and loads no model. Imports torch, and compiles the kernels as the first step would.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Literal

import typer
from rich.table import Table

from evenflow import __version__
from evenflow.advisor import sglang_flags, vllm_flags
from evenflow.cli.options import JsonTarget
from evenflow.cli.output import text_console, write_json
from evenflow.config import GIB
from evenflow.errors import EvenflowError, InvalidInput
from evenflow.host import available_memory, cache_folder, num_cpus, total_memory
from evenflow.hosts.launch import HostPackage
from evenflow.model.hub.cached_models import cached_models
from evenflow.model.hub.progress_bar import format_bytes
from evenflow.sglang.launch import SGLANG
from evenflow.vllm.launch import VLLM

State = Literal["ok", "note", "problem"]

_EXTRAS = {
    "engine": "the embedded engine and the server",
    "compile": "evenflow.compile, for models of transformers",
    "eval": "tasks with the scorer json-schema",
    "data": "datasets in Parquet",
    "otel": "traces",
}
_MIN_MEMORY = 2 * GIB  # for the default model in float32, with room for its KV cache
_NOT_INSTALLED = "not installed"
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Check:
    """`note`: something is missing that evenflow runs without. `problem`: something does not work until it is fixed."""

    name: str
    state: State
    found: str
    advice: str | None = None


def doctor(*, json: JsonTarget = None) -> None:
    """Show what works on this machine, and what to do about the rest.

    Packages, kernels, memory, the cache, other engines, models. Loads no model and uses no network. The exit code is 1
    if there is a problem; what evenflow can do without is a note.
    """
    checks = _run_checks()
    console = text_console(json)
    table = Table("", "what", "found", show_header=False)
    for check in checks:
        table.add_row(check.state, check.name, check.found)
    console.print(table)
    for check in checks:
        if check.advice is not None:
            console.print(f"{check.name}: {check.advice}")
    works = all(check.state != "problem" for check in checks)
    write_json(json, {"evenflow": __version__, "works": works, "checks": checks})
    if not works:
        raise typer.Exit(1)


def _run_checks() -> list[Check]:
    """All of them, in the order in which they are shown."""
    extras = _missing_by_extra()
    hosts = _check_hosts()
    checks = [Check("evenflow", "ok", f"{__version__}, Python {platform.python_version()}, {platform.platform()}")]
    checks += _check_extras(extras, has_host=any(check.found != _NOT_INSTALLED for check in hosts))
    checks += [_check_cores(), _check_memory(), _check_cache()]
    if not extras.get("engine"):
        checks += _check_own_engine()
    checks += [*hosts, _check_cuda(hosts[0], has_engine=not extras.get("engine")), _check_models(), _check_hub()]
    return checks


def _missing_by_extra() -> dict[str, list[str]]:
    """What each extra lacks here, from evenflow's own metadata."""
    missing: dict[str, list[str]] = {name: [] for name in _EXTRAS}
    try:
        lines = metadata.requires("evenflow") or []
    except metadata.PackageNotFoundError:  # it runs from a folder; the engine's check imports what it needs
        lines = []
    for line in lines:
        match = re.search(r"extra == ['\"](\w+)['\"]", line)
        if match and match[1] in missing and (problem := _unmet(line)):
            missing[match[1]].append(problem)
    return missing


def _unmet(line: str) -> str | None:
    """What is wrong with a requirement here, such as `torch` or `torch 2.9 (needs >=2.11)`."""
    name = re.match(r"[\w.-]+", line)
    assert name is not None, f"a requirement without a name: {line}"
    try:
        from packaging.requirements import Requirement
    except ImportError:  # it comes with the engine's packages, so that some are missing
        return None if vllm_flags.installed_version([name[0]]) else name[0]
    requirement = Requirement(line)
    if requirement.marker is not None and not any(requirement.marker.evaluate({"extra": extra}) for extra in _EXTRAS):
        return None  # for another platform
    version = vllm_flags.installed_version([requirement.name])
    if version is None:
        return requirement.name
    if requirement.specifier.contains(version, prereleases=True):
        return None
    return f"{requirement.name} {version} (needs {requirement.specifier})"


def _check_extras(missing: dict[str, list[str]], has_host: bool) -> Iterator[Check]:
    for name, purpose in _EXTRAS.items():
        lacks = ", ".join(missing[name])
        install = f"for {purpose}: pip install 'evenflow[{name}]'"
        if not lacks:
            found = f"installed, torch {vllm_flags.installed_version(['torch'])}" if name == "engine" else "installed"
            yield Check(f"extra {name}", "ok", found)
        elif name == "engine" and not has_host:
            yield Check(f"extra {name}", "problem", f"lacks {lacks}; no vLLM or SGLang either", install)
        elif name == "engine":
            advice = "for evenflow's own engine. Install it in another environment: it may change vLLM's packages"
            yield Check(f"extra {name}", "note", f"lacks {lacks}", advice)
        else:
            yield Check(f"extra {name}", "note", f"lacks {lacks}", install)


def _check_cores() -> Check:
    cores, found = num_cpus(), f"{num_cpus()} of {os.cpu_count()} ({platform.machine()})"
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) != cores:
        return Check("cores", "note", f"{found}, OMP_NUM_THREADS={threads}", "unset it, or set --threads")
    return Check("cores", "ok", found)


def _check_memory() -> Check:
    found = f"{available_memory() / GIB:.1f} of {total_memory() / GIB:.1f} GiB available"
    if available_memory() < _MIN_MEMORY:
        return Check("memory", "note", found, "use --weights int4 and a small --kv-cache-memory, or a smaller model")
    return Check("memory", "ok", found)


def _check_cache() -> Check:
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        found = f"{folder} cannot be written ({error.strerror})"
        return Check("cache", "problem", found, "set EVENFLOW_CACHE to a folder that can be")
    return Check("cache", "ok", f"{folder}, {format_bytes(shutil.disk_usage(folder).free)} free")


def _check_own_engine() -> Iterator[Check]:
    try:
        from evenflow.executors.torch_executor import default_threads
        from evenflow.native.build import find_compiler, why_unavailable
    except (ImportError, OSError) as error:  # a wheel of another platform, a library that is missing
        yield Check("torch", "problem", f"cannot be imported: {error}", "install it again: pip install --force torch")
        return
    yield Check("threads", "ok", f"{default_threads()} for a step (--threads sets another number)")
    compiler = find_compiler()
    if compiler is None:
        yield Check("C++ compiler", "note", "none (g++, c++ or clang++)")
    else:
        yield Check("C++ compiler", "ok", compiler)
    reason = why_unavailable()
    if reason is None:
        yield Check("native kernels", "ok", "compiled for this CPU and loaded")
    else:
        what, _, advice = reason.partition("; ")
        yield Check("native kernels", "note", f"not used: {what}", advice or "torch alone is slower")
    yield from _check_weight_formats()
    yield from _check_gpu_attention()


def _check_gpu_attention() -> Iterator[Check]:
    import torch

    if not torch.cuda.is_available():
        return
    from evenflow.model.cuda.backends import usable_backends

    device = torch.device("cuda")
    reasons = usable_backends(torch.bfloat16, device)
    usable = [name for name, reason in reasons.items() if reason is None]
    where = f"on {torch.cuda.get_device_name(device)}"
    for name, reason in reasons.items():
        if reason is None:
            yield Check(f"attention {name}", "ok", f"{'used' if name == usable[0] else 'works'} {where}")
        else:
            what, _, advice = reason.partition("; ")
            yield Check(f"attention {name}", "note", f"not used {where}: {what}", advice or None)


def _check_weight_formats() -> Iterator[Check]:
    """Multiplies by each, in the form that an engine here would choose."""
    import torch

    from evenflow.model.cpu.int4 import int4_linear
    from evenflow.model.cpu.linear import FloatLinear, Linear, computes_products

    weight = torch.linspace(-1, 1, 32 * 32).view(32, 32)
    forms: dict[str, Linear] = {"float32": FloatLinear(weight), "int4": int4_linear(weight, None)}
    for name, form in forms.items():
        by = "evenflow's kernels" if form.native is not None else "torch's kernels"
        if name == "int4" and isinstance(form, FloatLinear):
            yield Check(f"weights {name}", "note", "no fast 4-bit kernel here: int4 runs in float32", "use float32")
        elif computes_products(lambda rows, _, form=form: form(rows), torch.float32, tolerance=0.1):  # type: ignore[misc]
            yield Check(f"weights {name}", "ok", f"works, by {by}")
        else:
            advice = "set EVENFLOW_NATIVE=0 to run on torch alone, and report it"
            yield Check(f"weights {name}", "problem", f"gives wrong products, by {by}", advice)


def _check_host(host: HostPackage, known: str, why_unknown: Callable[[str], str | None]) -> Check:
    """Of the host here, or in the interpreter that the variable names."""
    python = os.environ.get(host.python_variable)
    try:
        version = vllm_flags.installed_version(host.packages) if python is None else host.version_in(python)
    except EvenflowError as error:
        return Check(host.name, "problem", str(error), f"correct {host.python_variable} or unset it")
    if version is None:
        advice = f"only --engine {host.engine} needs it: {host.install}, or name its Python in {host.python_variable}"
        return Check(host.name, "note", _NOT_INSTALLED, advice)
    if (why := why_unknown(version)) is not None:
        return Check(host.name, "note", why, f"evenflow {known}; other versions may work")
    return Check(host.name, "ok", f"{version} (evenflow serve --engine {host.engine})")


def _check_hosts() -> list[Check]:
    def why_unknown(check: Callable[[str], None], version: str) -> str | None:
        try:
            check(version)
        except InvalidInput as error:
            return str(error)
        return None

    vllm = f"knows {'.'.join(map(str, vllm_flags.OLDEST[:2]))} to {vllm_flags.NEWEST_VERSION}"
    sglang = f"knows {sglang_flags.OLDEST_VERSION} to {sglang_flags.NEWEST_VERSION}"
    return [
        _check_host(VLLM, vllm, partial(why_unknown, vllm_flags.check_known)),
        _check_host(SGLANG, sglang, partial(why_unknown, sglang_flags.check_known)),
    ]


def _check_cuda(vllm: Check, has_engine: bool) -> Check:
    if not _NVIDIA_DRIVER.is_file() and shutil.which("nvidia-smi") is None:
        return Check("CUDA", "ok", "no NVIDIA driver: evenflow's own engine runs on the CPU")
    problem = _cuda_problem() if has_engine else "the extra engine is not installed"
    if problem is None:
        return Check("CUDA", "ok", "evenflow's own engine runs on the GPU (--device cpu: not)")
    if vllm.state == "ok":
        return Check("CUDA", "ok", f"there is an NVIDIA driver: use --engine vllm for it ({problem})")
    advice = "to use it, install a torch that is built for CUDA, or install vLLM and give --engine vllm"
    return Check("CUDA", "note", f"there is an NVIDIA driver, but {problem}", advice)


def _cuda_problem() -> str | None:
    from evenflow.engine.placement import cuda_problem

    try:
        return cuda_problem()
    except (ImportError, OSError) as error:
        return f"torch cannot be imported: {error}"


def _check_models() -> Check:
    names = [model.name for model in cached_models()]
    if "default" in names:
        return Check("models", "ok", f"{', '.join(names)} (evenflow models says more)")
    found = f"{', '.join(names) or 'none'}; the default model is not fetched yet"
    return Check("models", "note", found, "the first use fetches it, or: evenflow pull default")


def _check_hub() -> Check:
    from evenflow.model.hub.repository import endpoint, hub_token, is_offline

    token = "with a token" if hub_token() else "no token (HF_TOKEN)"
    if is_offline():
        return Check("model hub", "note", "HF_HUB_OFFLINE is set", "unset it to fetch models")
    return Check("model hub", "ok", f"{endpoint()}, {token}; not asked")
