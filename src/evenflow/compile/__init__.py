"""Ahead-of-time compilation and chunked prefill for Hugging Face transformers models, which are called as before."""

from evenflow.errors import MissingDependency

try:
    from evenflow.compile.chunks.optimizer import ChunkedPrefillOptimizer, ChunkedPrefillWrapper
    from evenflow.compile.compiler import EnhancedAOTModelCompiler, GraphConfig, create_enhanced_compiler
    from evenflow.compile.with_chunking import (
        ChunkedPrefillConfig,
        EnhancedAOTWithChunking,
        create_enhanced_compiler_with_chunking,
    )
    from evenflow.compile.with_vllm import (
        EnhancedAOTWithVLLMChunking,
        VLLMChunkedModelWrapper,
        create_vllm_enhanced_compiler,
    )
except ModuleNotFoundError as error:
    raise MissingDependency(
        f"evenflow.compile needs {error.name}, which is not installed: pip install 'evenflow[compile]'"
    ) from error

__all__ = [
    "ChunkedPrefillConfig",
    "ChunkedPrefillOptimizer",
    "ChunkedPrefillWrapper",
    "EnhancedAOTModelCompiler",
    "EnhancedAOTWithChunking",
    "EnhancedAOTWithVLLMChunking",
    "GraphConfig",
    "VLLMChunkedModelWrapper",
    "create_enhanced_compiler",
    "create_enhanced_compiler_with_chunking",
    "create_vllm_enhanced_compiler",
]
