"""--help in panels: everyday options first, and the others by what they are about."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand

PANELS = {
    "Limits": (
        *("max_body_size", "max_response_size", "max_prompt_tokens", "max_n", "max_waiting", "max_open_tokens"),
        *("max_tenant_requests", "max_num_seqs", "max_model_len", "shares", "drain_time", "step_timeout"),
    ),
    "Keys and access": (
        *("api_key", "api_key_file", "admin_api_key", "admin_api_key_file", "metrics_api_key", "metrics_api_key_file"),
        *("allow_host", "allow_origin", "allow_special_tokens"),
    ),
    "Memory": (
        *("gpu_memory_utilization", "kv_cache_memory", "enable_prefix_caching", "kv_offload_memory"),
        *("kv_offload_format", "cache_dir", "cache_dir_size"),
    ),
    "Engine": (
        *("device", "weights", "load_format", "deterministic", "threads", "max_num_batched_tokens"),
        *("enable_chunked_prefill", "long_prefill_token_threshold"),
    ),
    "Logs and traces": ("log_format", "access_log", "request_log", "record", "otlp_endpoint"),
    "Another engine": (
        *("engine", "vllm_python", "sglang_python", "warm_up"),
        *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    ),
}
_PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}


class PanelCommand(TyperCommand):
    """A command whose options are shown in panels. A panel of one option is not worth its heading."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for panel, parameters in in_panels(self.get_params(ctx)):
            with formatter.section(panel):
                formatter.write_dl([record for one in parameters if (record := one.get_help_record(ctx)) is not None])


def in_panels(parameters: Iterable[Any]) -> list[tuple[str, list[Any]]]:
    """The parameters that are shown, by panel."""
    found: dict[str, list[Any]] = {"Arguments": [], "Options": [], **{panel: [] for panel in PANELS}}
    for one in parameters:
        if not getattr(one, "hidden", False):
            is_argument = one.param_type_name == "argument"
            found["Arguments" if is_argument else _PANEL_OF.get(one.name, "Options")].append(one)
    for panel in PANELS:
        if len(found[panel]) == 1:
            found["Options"] += found.pop(panel)
    return [(panel, shown) for panel, shown in found.items() if shown]
