"""Ahead-of-time compilation and chunked prefill for models of Hugging Face transformers, called as the models are."""

from evenflow.compile.optimizer import ChunkedPrefillOptimizer
from evenflow.compile.wrapper import ChunkedPrefillWrapper

__all__ = ["ChunkedPrefillOptimizer", "ChunkedPrefillWrapper"]
