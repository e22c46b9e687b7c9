"""Where a model runs: device, data type, KV memory. Imports torch when called."""

from __future__ import annotations

import logging
import platform
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from evenflow.config import DEVICES, GIB, WEIGHTS_BY_DEVICE, EngineConfig, WeightsName
from evenflow.core.policies import DEFAULT_TARGET_BUDGET, PolicySpec
from evenflow.core.roofline import known_device, roofline
from evenflow.core.step_costs import StepCosts
from evenflow.errors import InvalidConfig
from evenflow.executors.base import Executor
from evenflow.host import available_memory, num_cpus, total_memory

if TYPE_CHECKING:
    import torch

    from evenflow.executors.kv_tier import BlockMemory
    from evenflow.model.config import ModelConfig
    from evenflow.model.cuda.decoder import PagedDecoder
    from evenflow.model.loader import LoadedModel
    from evenflow.model.text.grammar import Grammars

logger = logging.getLogger("evenflow")

_MAX_DEFAULT_CPU_KV_BYTES = 4 * GIB
_LARGEST_GPU_CHUNK = 4096  # tried at start


@dataclass(frozen=True, slots=True)
class Placement:
    """An executor and its properties."""

    executor: Executor
    policy: PolicySpec
    num_blocks: int
    max_model_len: int
    machine: Hashable  # identifies the machine's speed for stored step times
    blocks: BlockMemory | None = None  # None: nothing is cached
    prior: StepCosts | None = None
    largest_trial_chunk: int | None = None  # None: the first step of a size is not slower


def on_this_machine(config: EngineConfig) -> EngineConfig:
    """The settings with all open choices made: device, weights, steps in flight."""
    device = config.device or ("cuda" if _prefers_cuda(config) else "cpu")
    if device == "cuda" and (problem := cuda_problem()) is not None:
        if config.device is None:
            raise InvalidConfig(
                f"Got weights={config.weights!r}, which needs a GPU, but {problem}: use weights='float32'."
            )
        raise InvalidConfig(f"Got device='cuda' but {problem}: use device='cpu'.")
    weights = config.weights if config.weights != "auto" else _default_weights(device)
    in_flight = config.max_steps_in_flight or (2 if device == "cuda" else 1)
    return replace(config, device=device, weights=weights, max_steps_in_flight=in_flight)


def _prefers_cuda(config: EngineConfig) -> bool:
    runs_there = config.weights in ("auto", *WEIGHTS_BY_DEVICE["cuda"])
    return (runs_there and cuda_problem() is None) or config.weights not in ("auto", *WEIGHTS_BY_DEVICE["cpu"])


def cuda_problem() -> str | None:
    """The reason why no GPU can be used, as the end of a sentence."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return None if torch.cuda.is_available() else "there is no NVIDIA GPU, or its driver does not work"


def _default_weights(device: str) -> WeightsName:
    import torch

    default, other, *_ = WEIGHTS_BY_DEVICE[device]
    return other if device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False) else default


def place(config: EngineConfig, model: LoadedModel, grammars: Grammars) -> Placement:
    """Load the weights and make the executor. `config` comes from `on_this_machine`."""
    assert config.device in DEVICES
    on_host = ("kv_cache_memory", "kv_offload_memory") if config.device == "cpu" else ("kv_offload_memory",)
    for name in on_host:
        if (asked := getattr(config, name) or 0) > (most := total_memory()):
            got = f"Got {name}={asked}, which is {asked / GIB:,.1f} GiB"
            raise InvalidConfig(f"{got}, but this machine has {most / GIB:,.1f} GiB: lower it.")
    if config.device == "cpu":
        return _on_cpu(config, model, grammars)
    import torch

    return place_paged(config, model, grammars, torch.device("cuda", torch.cuda.current_device()))


def _on_cpu(config: EngineConfig, model: LoadedModel, grammars: Grammars) -> Placement:
    from evenflow.executors.torch_executor import TorchExecutor
    from evenflow.model.cpu.kv_cache import kv_bytes_per_token
    from evenflow.native.build import library

    memory = config.kv_cache_memory
    if memory is None:
        memory = min(int(available_memory() * config.gpu_memory_utilization), _MAX_DEFAULT_CPU_KV_BYTES)
    # Cached prefixes are stored beside the running copies.
    copies = 2 if config.enable_prefix_caching else 1
    num_blocks = _num_blocks(config, memory, copies * kv_bytes_per_token(model.config))
    max_model_len = _max_model_len(config, model.config, num_blocks)
    policy = config.resolve_policy(max_model_len)
    executor = TorchExecutor(
        model.config,
        model.weights,
        num_blocks=num_blocks,
        block_size=config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        weights="int4" if config.weights == "int4" else "float32",
        threads=config.threads,
        deterministic=config.deterministic,
        max_steps_in_flight=config.max_steps_in_flight or 1,
        grammars=grammars,
    )
    machine = config.threads, platform.processor(), num_cpus(), library() is not None, config.deterministic
    return Placement(executor, policy, num_blocks, max_model_len, machine, executor.blocks)


def place_paged(config: EngineConfig, model: LoadedModel, grammars: Grammars, device: torch.device) -> Placement:
    """Place with paged KV memory, as on a GPU. Slow on a CPU, where it needs `kv_cache_memory`."""
    import torch

    from evenflow.executors.cuda_executor import CudaExecutor
    from evenflow.model.cuda.backends import can_capture, choose_attention, choose_operations
    from evenflow.model.cuda.decoder import PagedDecoder

    dtype: torch.dtype = getattr(torch, config.weights)
    longest = min(config.max_model_len or model.config.max_position, model.config.max_position)
    # Its memory depends on the longest context.
    attention = choose_attention(replace(model.config, max_position=longest), dtype, device, config.deterministic)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    logger.info("Running on %s in %s, attention by %s.", name, config.weights, attention.name)
    operations = choose_operations(device, config.deterministic)
    decoder = PagedDecoder(model.config, model.weights.on(device, dtype), attention, operations, longest)
    num_blocks = _num_blocks(config, _gpu_kv_memory(config, decoder, longest), decoder.kv_bytes_per_token())
    max_model_len = _max_model_len(config, model.config, num_blocks)
    policy = config.resolve_policy(max_model_len)
    logger.info("The KV cache holds %d tokens in blocks of %d.", num_blocks * config.block_size, config.block_size)
    executor = CudaExecutor(
        decoder,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_steps_in_flight=config.max_steps_in_flight or 2,
        max_step_rows=_max_step_rows(config, max_model_len),
        uses_graphs=device.type != "cuda" or can_capture(attention, operations),
        grammars=grammars,
        deterministic=config.deterministic,
    )
    prior = _prior(decoder, name)
    machine = name, attention.name
    return Placement(executor, policy, num_blocks, max_model_len, machine, executor.blocks, prior, _LARGEST_GPU_CHUNK)


def _gpu_kv_memory(config: EngineConfig, decoder: PagedDecoder, longest: int) -> int:
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory
    from evenflow.model.cuda.memory import kv_memory

    return kv_memory(
        decoder,
        utilization=config.gpu_memory_utilization,
        max_rows=_max_step_rows(config, longest),
        max_num_seqs=config.max_num_seqs,
        max_len=longest,
    )


def _max_step_rows(config: EngineConfig, max_model_len: int) -> int:
    budget = config.resolve_policy(max_model_len).budget if config.chosen_policy else DEFAULT_TARGET_BUDGET
    return max(budget, config.max_num_seqs)


def _prior(decoder: PagedDecoder, device_name: str) -> StepCosts | None:
    """Expected step costs before any has run; None for an unknown device."""
    from evenflow.model.formats.weights import model_work

    device = known_device(device_name)
    if device is None:
        return None
    # The launch overlaps with the step before.
    work = model_work(decoder.config, decoder.dtype.itemsize)
    return roofline(work, device, decoder.attention.waves)._replace(launch=0.0)


def _num_blocks(config: EngineConfig, memory: int, token_bytes: int) -> int:
    """Blocks that fit the KV memory."""
    num_blocks = memory // (token_bytes * config.block_size)
    if num_blocks < 1:
        raise InvalidConfig(
            f"Got {max(0, memory)} bytes for the KV cache but one block of {config.block_size} tokens takes "
            f"{token_bytes * config.block_size}: raise kv_cache_memory or gpu_memory_utilization."
        )
    return num_blocks


def _max_model_len(config: EngineConfig, model: ModelConfig, num_blocks: int) -> int:
    asked = config.max_model_len
    if asked is not None and asked > model.max_position:
        raise InvalidConfig(f"Got max_model_len={asked} but the model's context is {model.max_position}.")
    wanted, capacity = asked or model.max_position, num_blocks * config.block_size
    if wanted > capacity:
        if asked is not None:
            raise InvalidConfig(
                f"Got max_model_len={asked} but the KV cache holds {capacity} tokens: raise kv_cache_memory."
            )
        logger.warning("The KV cache holds %d tokens: contexts are limited to that, not %d.", capacity, wanted)
    return min(wanted, capacity)
