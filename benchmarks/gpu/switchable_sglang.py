"""An SGLang plug-in for benchmarks: SGLang's own scheduler, or steered to a target, switched between runs by a file.

All runs then share one engine and differ in nothing else. The file holds `default`, `fixed:N` (decodes mixed into
chunks of N), `unmixed:N` or `target:MSms`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mode_file import MODE_VARIABLE

from evenflow.core.policies import PolicySpec

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
    scheduler.bench_switch = Switch(scheduler, Path(os.environ[MODE_VARIABLE]))


def _before_add(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    scheduler.bench_switch.read_mode()


class Switch:
    """Of one scheduler, between its runs."""

    def __init__(self, scheduler: Any, mode_path: Path) -> None:
        self._scheduler, self._mode_path = scheduler, mode_path
        self._steering = scheduler.evenflow
        self._own = scheduler.chunked_prefill_size, scheduler.is_mixed_chunk
        self._read_at = 0

    def read_mode(self) -> None:
        """Steps in flight belong to the mode that scheduled them: switch only when there are none."""
        written_at = self._mode_path.stat().st_mtime_ns
        if written_at == self._read_at or not self._scheduler.is_fully_idle():
            return
        self._read_at = written_at
        self.apply(self._mode_path.read_text())

    def apply(self, mode: str) -> None:
        scheduler, (kind, _, size) = self._scheduler, mode.partition(":")
        scheduler.evenflow = self._steering if kind == "target" else None
        scheduler.chunked_prefill_size, scheduler.is_mixed_chunk = self._own
        if kind == "target":
            self._steering.core.set_policy(PolicySpec.parse(mode))
        elif kind != "default":
            scheduler.chunked_prefill_size, scheduler.is_mixed_chunk = int(size), kind == "fixed"
