"""Advice on settings: from datasets and traces to a decision, from a server's log to its meaning.

Needs neither torch nor vLLM.
"""

from evenflow.advisor.analysis import PRESET_TOKENS, preset_dataset
from evenflow.advisor.datasets import analyze
from evenflow.advisor.decision import Chunking, Decision, should_enable_chunked_prefill
from evenflow.advisor.vllm_config import VLLMChunkedPrefillConfig, VLLMChunkedPrefillOptimizer

__all__ = [
    "PRESET_TOKENS",
    "Chunking",
    "Decision",
    "VLLMChunkedPrefillConfig",
    "VLLMChunkedPrefillOptimizer",
    "analyze",
    "preset_dataset",
    "should_enable_chunked_prefill",
]
