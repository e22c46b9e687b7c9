"""llama.cpp behind the protocol, through llama-cpp-python's low-level calls: its `Llama` class runs only one sequence.

Except for threads and sizes, contexts keep llama.cpp's defaults: batches of 2,048 in slices of 512, a 16-bit KV cache.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import llama_cpp
import numpy as np

from peers.protocol import Generate, Job, Setup, serve

TOKENS_PER_SEQUENCE = 4096
Row = tuple[int, int, int, bool]  # token id, position, sequence, whether its logits are wanted


class Context:
    """A KV cache for some sequences, and one batch that is reused for every call."""

    def __init__(self, model: ctypes.c_void_p, num_sequences: int, threads: int) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = TOKENS_PER_SEQUENCE * num_sequences
        params.n_seq_max = num_sequences
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(model, params)
        self._max_rows = int(params.n_batch)
        self._batch = llama_cpp.llama_batch_init(self._max_rows, 0, 1)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def clear(self) -> None:
        """Forget every sequence."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)

    def run(self, rows: list[Row]) -> dict[int, int]:
        """Compute the rows; returns the likeliest next token of each sequence that wants logits."""
        next_tokens: dict[int, int] = {}
        for start in range(0, len(rows), self._max_rows):
            next_tokens |= self._run_batch(rows[start : start + self._max_rows])
        return next_tokens

    def _run_batch(self, rows: list[Row]) -> dict[int, int]:
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token_id, position, sequence, wants_logits) in enumerate(rows):
            batch.token[index] = token_id
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = wants_logits
        status = llama_cpp.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}, expected 0")
        return {row[2]: self._likeliest(index) for index, row in enumerate(rows) if row[3]}

    def _likeliest(self, index: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, index)
        return int(np.argmax(np.ctypeslib.as_array(logits, shape=(self._vocab_size,))))


def _has_amx() -> bool:
    cpu_info = Path("/proc/cpuinfo")
    return cpu_info.exists() and "amx_int8" in cpu_info.read_text()


def load(setup: Setup) -> Generate:
    """The GGUF file itself, with one context per number of sequences."""
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    # Its AMX kernels end in an illegal instruction (0.3.36, Q4_1 weights); without them it runs AVX-512.
    params.use_extra_bufts = not _has_amx()
    model = llama_cpp.llama_model_load_from_file(setup.model.encode(), params)
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {setup.model}")

    @cache
    def context_for(num_sequences: int) -> Context:
        return Context(model, num_sequences, setup.threads)

    def generate(job: Job) -> list[list[int]]:
        context = context_for(len(job.prompts))
        context.clear()
        rows = [
            (token_id, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(job.prompts)
            for position, token_id in enumerate(prompt)
        ]
        token_ids: list[list[int]] = [[] for _ in job.prompts]
        for num_generated in range(job.max_tokens):
            next_tokens = context.run(rows)
            for sequence, token_id in next_tokens.items():
                token_ids[sequence].append(token_id)
            rows = [
                (token_id, len(job.prompts[sequence]) + num_generated, sequence, True)
                for sequence, token_id in next_tokens.items()
            ]
        return token_ids

    return generate


if __name__ == "__main__":
    serve(load)
