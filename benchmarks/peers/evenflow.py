"""evenflow behind the protocol: each prompt in one step, without prefix caching, like every peer."""

from __future__ import annotations

from typing import cast

from evenflow import LLM, SamplingParams
from evenflow.config import WeightsName
from peers.protocol import Generate, Job, Setup, serve


def load(setup: Setup) -> Generate:
    """The embedded engine with the requested weights."""
    weights = cast("WeightsName", setup.weights)
    llm = LLM(setup.model, policy="unchunked", enable_prefix_caching=False, weights=weights, threads=setup.threads)

    def generate(job: Job) -> list[list[int]]:
        greedy = SamplingParams(temperature=0, max_tokens=job.max_tokens, ignore_eos=True)
        return [list(output.token_ids) for output in llm.generate(job.prompts, greedy)]

    return generate


if __name__ == "__main__":
    serve(load)
