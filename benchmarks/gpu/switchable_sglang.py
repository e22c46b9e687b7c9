"""An SGLang plug-in for benchmarks: SGLang's own scheduler, or steered to a target, switched between runs by a file.

All runs then share one engine and differ in nothing else. The file holds `default`, `fixed:N` (decodes mixed into
chunks of N), `unmixed:N` or a mode with a target.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from mode_file import ModeFile, with_target

ENTRY_POINT = "[sglang.srt.plugins]\nevenflow_bench = switchable_sglang:load\n"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


def write_entry_point(folder: Path) -> None:
    """Have SGLang find this plug-in where `folder` is in the search path; it loads evenflow's own."""
    metadata = folder / "evenflow_bench-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: evenflow-bench\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINT)


def load() -> None:
    """What SGLang calls in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from evenflow.sglang import plugin

    plugin.load()
    HookRegistry.register(f"{_SCHEDULER}.__init__", _after_init, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}._add_request_to_queue", _before_add, HookType.BEFORE)


def _after_init(_: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    scheduler.bench_switch = Switch(scheduler)


def _before_add(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    if hasattr(scheduler, "bench_switch"):  # not yet in the plug-in's own steps, before the first request
        scheduler.bench_switch.read_mode()


class Switch:
    """Of one scheduler, between its runs."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._mode_file = ModeFile()
        self._steering = scheduler.evenflow
        self._own = scheduler.chunked_prefill_size, scheduler.is_mixed_chunk

    def read_mode(self) -> None:
        if not self._scheduler.is_fully_idle() or (mode := self._mode_file.read_if_changed()) is None:
            return
        self.apply(mode)
        self._mode_file.confirm()

    def apply(self, mode: str) -> None:
        scheduler, (kind, _, size) = self._scheduler, mode.partition(":")
        scheduler.chunked_prefill_size, scheduler.is_mixed_chunk = self._own
        scheduler.evenflow = None
        if kind.endswith("target"):
            make = partial(self._make, scheduler)
            scheduler.evenflow = self._steering = with_target(self._steering, mode, None, make)
        elif kind != "default":
            scheduler.chunked_prefill_size, scheduler.is_mixed_chunk = int(size), kind == "fixed"

    @staticmethod
    def _make(scheduler: Any, settings: Any) -> Any:
        from evenflow.sglang.steering import make_steering

        return make_steering(scheduler, settings)
