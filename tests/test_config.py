"""Settings are checked when they are made, and what they leave open is decided in one place."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from typing import Any, get_type_hints

import pytest

from evenflow import EngineConfig
from evenflow.config import EngineSettings
from evenflow.engine.llm import LLM
from evenflow.errors import InvalidConfig


@pytest.mark.parametrize(
    ("settings", "policy", "budget"),
    [
        ({"max_num_batched_tokens": 300}, "fixed:300", 300),
        ({"policy": "fixed:512"}, "fixed:512", 512),
        ({"policy": "fixed:512", "max_num_batched_tokens": 512}, "fixed:512", 512),
        ({"policy": "alternate:64"}, "alternate:64", 64),
        ({"policy": "adaptive", "max_num_batched_tokens": 700}, "adaptive", 700),
        ({"policy": "unchunked"}, "unchunked", 8192),
        ({"enable_chunked_prefill": False}, "unchunked", 8192),
        ({"tbt_target": 0.0025}, "target:2.5ms", 8192),
        ({"policy": "target:2.5ms", "tbt_target": 0.0025}, "target:2.5ms", 8192),
        ({"policy": "target:33.3ms,paced", "tbt_target": 0.0333}, "target:33.3ms,paced", 8192),
        ({"policy": "target:50ms", "max_num_batched_tokens": 700}, "target:50ms", 700),
    ],
)
def test_what_a_setting_comes_to(settings: dict[str, Any], policy: str, budget: int) -> None:
    spec = EngineConfig(**settings).resolve_policy(8192)
    assert (str(spec), spec.budget) == (policy, budget)


@pytest.mark.parametrize("settings", [{}, {"enable_chunked_prefill": True}, {"max_num_seqs": 8}])
def test_without_such_a_setting_the_engine_chooses_a_target(settings: dict[str, Any]) -> None:
    assert EngineConfig(**settings).chosen_policy is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "fixed:512", "max_num_batched_tokens": 256}, "two different budgets"),
        ({"policy": "alternate:512", "max_num_batched_tokens": 256}, "two different budgets"),
        ({"policy": "fixed:512", "enable_chunked_prefill": False}, "cuts prompts"),
        ({"policy": "unchunked", "enable_chunked_prefill": True}, "never cuts"),
        ({"policy": "unchunked", "long_prefill_token_threshold": 5}, "no prompt is cut"),
        ({"policy": "nonsense"}, "'nonsense'"),
        ({"policy": "target:50ms", "tbt_target": 0.06}, "two policies"),
        ({"policy": "fixed:512", "tbt_target": 0.05}, "two policies"),
        ({"tbt_target": 0}, "tbt_target=0 "),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0"),
        ({"max_num_batched_tokens": -5}, "max_num_batched_tokens=-5"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_seqs": True}, "max_num_seqs=True"),
        ({"kv_offload_memory": -1}, "kv_offload_memory=-1"),
        ({"kv_offload_format": "int3"}, "kv_offload_format='int3' but expected 'plain' or 'lossless' or 'int8'"),
        ({"cache_dir": "x", "enable_prefix_caching": False}, "cache_dir='x' with enable_prefix_caching=False"),
        ({"kv_offload_memory": 1, "enable_prefix_caching": False}, "kv_offload_memory=1 with enable_prefix"),
        ({"device": "tpu"}, "device='tpu' but expected 'cpu' or 'cuda'"),
        ({"device": "cuda", "weights": "int4"}, "weights='int4' but expected 'bfloat16'"),
        ({"device": "cpu", "weights": "bfloat16"}, "expected 'float32' or 'int4' with device='cpu'"),
        ({"load_format": "pickle"}, "'pickle'"),
        ({"gpu_memory_utilization": 1.3}, "gpu_memory_utilization=1.3"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization=0"),
        ({"weights": "int3"}, "'int3'"),
        ({"threads": 0}, "threads=0"),
    ],
)
def test_a_bad_setting_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        EngineConfig(**settings)


def test_without_chunks_the_budget_must_hold_the_longest_prompt() -> None:
    config = EngineConfig(enable_chunked_prefill=False, max_num_batched_tokens=4096)
    spec = config.resolve_policy(4096)
    assert (str(spec), spec.budget) == ("unchunked", 4096)
    with pytest.raises(InvalidConfig, match=r"max_num_batched_tokens=4096.*8192"):
        config.resolve_policy(8192)


def test_settings_with_a_target_can_be_changed_in_part() -> None:
    config = EngineConfig(tbt_target=1 / 30)
    assert replace(config, max_num_seqs=7).spec == config.spec


def test_an_unknown_setting_is_named() -> None:
    with pytest.raises(TypeError, match="'max_tokens'"):
        LLM("default", max_tokens=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('LLM("default", tbt_target="400ms", max_num_seqs=8)', None),
        ("LLM(tbt_taget=0.4)", 'Unexpected keyword argument "tbt_taget"'),
        ('AsyncLLM("default", max_num_seqs="8")', 'has incompatible type "str"; expected "int"'),
        ('LLM().generate([{"prompt": "a"}, {"prompt_token_ids": [1]}, "b", [1, 2]])', None),
        ("LLM().embed([[1, 2], [3]])", None),
        ('LLM().generate([{"promt": "a"}])', "incompatible type"),
        ('LLM().generate({"promt": "a"})', 'Extra key "promt"|incompatible type'),
        ('LLM().generate({"prompt": "a"}, SamplingParams(n=2, temperature=1))', None),
    ],
)
def test_mypy_finds_wrong_settings(line: str, problem: str | None) -> None:
    code = f"from evenflow import LLM, AsyncLLM, SamplingParams\n{line}\n"
    # Without the project's settings, which name files to check.
    command = [sys.executable, "-m", "mypy", "--config-file=", "--strict", "--follow-imports", "silent", "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (found.returncode == 0) == (problem is None), found.stdout
    assert re.search(problem or "Success", found.stdout), found.stdout


def test_type_checkers_know_every_setting() -> None:
    fields = get_type_hints(EngineConfig)
    assert fields.pop("model") is str
    assert get_type_hints(EngineSettings) == fields


def test_importing_the_package_and_its_settings_loads_no_torch() -> None:
    code = "import sys, evenflow; evenflow.EngineConfig(); evenflow.LLM; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
