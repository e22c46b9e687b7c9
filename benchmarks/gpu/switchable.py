"""A scheduler for benchmarks: vLLM's own with a budget, or steered to a target, switched between runs by a file.

All runs then share one engine and differ in nothing else. The file holds `fixed:N` or a mode with a target.
"""

from __future__ import annotations

from typing import Any

from mode_file import ModeFile, with_target

from evenflow.vllm import plugin
from evenflow.vllm.steering import VllmSteering


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
            self.steering: VllmSteering
            self.mode_file = ModeFile()
            self.is_plain = False
            self.num_in_flight = 0  # steps; those of aborted requests too
            self.vllm_budget: int = self.max_num_scheduled_tokens

        def read_mode(self) -> None:
            if self.requests or self.num_in_flight or (mode := self.mode_file.read_if_changed()) is None:
                return
            self.is_plain = mode.startswith("fixed:")
            self.max_num_scheduled_tokens = int(mode.removeprefix("fixed:")) if self.is_plain else self.vllm_budget
            if not self.is_plain:
                config = self.vllm_config.additional_config
                self.steering = with_target(self.steering, mode, config, lambda made: VllmSteering(self, made))
            self.mode_file.confirm()

        def add_request(self, request: Any) -> None:
            self.read_mode()
            if self.is_plain:
                plain.add_request(self, request)
            else:
                super().add_request(request)

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            self.num_in_flight += 1
            return plain.schedule(self, *args, **kwargs) if self.is_plain else super().schedule(*args, **kwargs)

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            self.num_in_flight -= 1
            if self.is_plain:
                return plain.update_from_output(self, scheduler_output, model_runner_output)
            return super().update_from_output(scheduler_output, model_runner_output)

    return Switching
