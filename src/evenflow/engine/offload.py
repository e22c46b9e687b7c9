"""Builds the tier behind the KV cache from the settings: its size, and the readable files of earlier runs."""

from __future__ import annotations

import hashlib
import logging
import sys
from pathlib import Path

from evenflow.config import EngineConfig
from evenflow.core.tier import TierConfig
from evenflow.errors import InvalidConfig
from evenflow.executors.block_files import BlockFiles
from evenflow.executors.kv_tier import BlockMemory, KvTier
from evenflow.model.config import ModelConfig
from evenflow.model.kv_codec import CODECS

logger = logging.getLogger("evenflow")


def build_tier(config: EngineConfig, model: ModelConfig, path: Path, blocks: BlockMemory) -> tuple[KvTier, TierConfig]:
    """The tier for a model at `path`. Files of other models or settings are not read."""
    codec = CODECS[config.kv_offload_format or ("plain" if blocks.is_on_gpu else "lossless")]
    layout = blocks.layout
    files = None
    if config.cache_dir is not None:
        identity = model, config.weights, config.load_format, config.block_size, layout, codec.name, sys.byteorder
        files = BlockFiles(Path(config.cache_dir), _fingerprint(path, identity), config.cache_dir_size)
    try:
        tier = KvTier(blocks, codec, host_bytes=config.kv_offload_memory, files=files)
    except (MemoryError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise InvalidConfig(
            f"Got kv_offload_memory={config.kv_offload_memory} but the host cannot give that much memory to the GPU "
            f"({reason}): lower it."
        ) from error
    plan = tier.config()
    if plan.num_blocks < 1 or (files is not None and files.capacity(codec.max_bytes(layout)) < 1):
        tier.close()
        name = "kv_offload_memory" if files is None else "cache_dir_size"
        raise InvalidConfig(
            f"Got {name}={getattr(config, name)} but one block of {config.block_size} tokens may take "
            f"{codec.max_bytes(layout)} bytes: raise it, or leave it out."
        )
    logger.info(
        "Up to %d tokens that leave the KV cache are kept (%s); %d are there from earlier runs. "
        "%d tokens leave in %.3g ms and come back in %.3g ms.",
        *(plan.num_blocks * config.block_size, codec.name, len(plan.contents) * config.block_size),
        *(config.block_size, 1000 * plan.save_seconds, 1000 * plan.restore_seconds),
    )
    return tier, plan


def _fingerprint(path: Path, identity: object) -> str:
    """Identifies a model's files by names, sizes and times, and everything else that its KV depends on."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    states = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
    return hashlib.sha256(repr((states, identity)).encode()).hexdigest()[:32]
