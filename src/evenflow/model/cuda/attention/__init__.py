"""Attention over paged KV memory: the interface of backends, FlashInfer's, our Triton kernels, and plain torch."""
