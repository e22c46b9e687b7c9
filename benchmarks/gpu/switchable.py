"""A scheduler for benchmarks: vLLM's own with a budget, or steered to a target, switched between runs by a file.

All runs then share one engine and differ in nothing else. The file holds `fixed:N` or `target:MSms`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mode_file import MODE_VARIABLE

from evenflow.core.policies import PolicySpec
from evenflow.vllm import plugin


class Switchable:
    """What `--scheduler-cls` names."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        return _switchable(type(plugin.LatencyTargetScheduler(vllm_config, *args, **kwargs)))(
            vllm_config, *args, **kwargs
        )


def _switchable(steered: type[Any]) -> type[Any]:
    plain: Any = steered.__bases__[0]

    class Switching(steered):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.mode_path = Path(os.environ[MODE_VARIABLE])
            self.mode_read_at = 0
            self.is_plain = False
            self.vllm_budget: int = self.max_num_scheduled_tokens

        def read_mode(self) -> None:
            written_at = self.mode_path.stat().st_mtime_ns
            if written_at == self.mode_read_at or self.requests:
                return
            self.mode_read_at = written_at
            mode = self.mode_path.read_text()
            self.is_plain = mode.startswith("fixed:")
            self.max_num_scheduled_tokens = int(mode.removeprefix("fixed:")) if self.is_plain else self.vllm_budget
            if not self.is_plain:
                self.steering.core.set_policy(PolicySpec.parse(mode))

        def add_request(self, request: Any) -> None:
            self.read_mode()
            if self.is_plain:
                plain.add_request(self, request)
            else:
                super().add_request(request)

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            return plain.schedule(self, *args, **kwargs) if self.is_plain else super().schedule(*args, **kwargs)

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            if self.is_plain:
                return plain.update_from_output(self, scheduler_output, model_runner_output)
            return super().update_from_output(scheduler_output, model_runner_output)

    return Switching
