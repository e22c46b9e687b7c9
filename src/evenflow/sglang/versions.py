"""What SGLang's versions call the same things, 0.5.16 to 0.5.23. The rest of the adapter knows no versions."""

from __future__ import annotations

from typing import Any

import sglang
from sglang.srt.managers import schedule_policy
from sglang.srt.runtime_context import get_context, get_parallel

from evenflow.advisor.sglang_flags import parse_version


def setting(name: str, absent: Any = None) -> Any:
    """A server argument as SGLang resolved it, or `absent` if this version has no such argument.

    Since 0.5.19 `ServerArgs` has only what the user gave; the resolved values are in the process's context.
    """
    context = get_context()
    if not hasattr(context.server_args, name):
        return absent
    return context.config_leaf(name) if hasattr(context, "config_leaf") else getattr(context.server_args, name)


def tp_rank() -> int:
    """This scheduler's rank in its tensor-parallel group. `Scheduler.ps`, which had it too, is gone since 0.5.21."""
    rank: int = get_parallel().tp_rank
    return rank


def tp_size() -> int:
    size: int = get_parallel().tp_size
    return size


def has_dp_attention() -> bool:
    """Since 0.5.22 --enable-dp-attention is only another spelling of --attn-dp-size."""
    return bool(setting("enable_dp_attention")) or get_parallel().attn_dp_size > 1


def mixes_piecewise_graphs() -> bool:
    """Whether SGLang mixes decodes into steps of torch's piecewise prefill graphs."""
    return parse_version(sglang.__version__) < (0, 5, 19)


def num_computed(request: Any) -> int:
    """Tokens of a request that are computed, or were found in the cache at the last look."""
    if hasattr(request, "prefix_len"):  # since 0.5.22
        length: int = request.prefix_len
        return length
    return len(request.prefix_indices)


def match_prefix(request: Any, tree_cache: Any) -> None:
    """Look up a waiting request's prefix in the cache."""
    if hasattr(schedule_policy, "match_kv_cache"):  # since 0.5.22
        schedule_policy.match_kv_cache(request, tree_cache)
    else:
        schedule_policy.match_prefix_for_req(tree_cache, request, include_req=True)
