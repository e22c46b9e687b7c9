"""The decoder on one GPU: paged KV memory, attention backends, fused kernels, captured graphs."""
