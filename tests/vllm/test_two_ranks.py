"""vLLM in two processes that share each step's tensors, or the requests, with evenflow's scheduler in it."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.models import reference_model
from tests.vllm.fronts import A_CORE_A_RANK, MODEL_SIZES, Front, needs_vllm, prompt_of, small_model

pytestmark = [pytest.mark.vllm, needs_vllm]


_PROMPT_LENGTHS = (5, 300, 40, 700)


@pytest.mark.parametrize("kind", ["tensor", "data"])
def test_two_ranks_answer_as_transformers_does_and_tell_of_their_steps(kind: str, tmp_path: Path) -> None:
    reference = reference_model("LlamaForCausalLM", **MODEL_SIZES)
    flag = f"--{kind}-parallel-size"
    with closing(Front(small_model(tmp_path), flag, "2", environment=A_CORE_A_RANK)) as front:
        for first_token, num_prompt_tokens in enumerate(_PROMPT_LENGTHS, start=7):
            prompt = torch.tensor([prompt_of(num_prompt_tokens, first_token)])
            expected = reference.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)
            answer = front.complete(num_prompt_tokens, 8, first_token)
            assert answer.choices[0].token_ids == expected[0, num_prompt_tokens:].tolist()
        front.until(lambda: _num_prefill_tokens(front) == sum(_PROMPT_LENGTHS))


def _num_prefill_tokens(front: Front) -> float:
    """As evenflow's front counted them, of all ranks."""
    found = re.search(r'^evenflow:step_tokens_total\{.*part="prefill".*\} (\S+)$', front.get("/metrics").text, re.M)
    return float(found[1]) if found else 0.0
