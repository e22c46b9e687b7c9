"""lm-eval's local-completions over two small tasks of our own: one that generates, one of loglikelihoods.

The loglikelihoods are compared with what evenflow's LLM says of the same texts, as the file expected.json has them.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import lm_eval_data
from checking import ADDRESS, MODEL, PROGRAMS, TOKENIZER, WORK, check, run_checks

_TOLERANCE = 0.02  # prompts that run together are added up in another order than one by one

_GENERATE = """\
task: evenflow_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 6, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""
_CHOOSE = """\
task: evenflow_choose
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


def evaluate(task: str, definition: str, **arguments: object) -> list[dict[str, Any]]:
    """Run a task, and return what is logged of its samples."""
    folder = WORK / f"{task}-{'-'.join(map(str, arguments.values()))}"
    folder.mkdir()
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(sample) + "\n" for sample in lm_eval_data.SAMPLES))
    (folder / "task.yaml").write_text(definition.format(data=data))
    model = {
        "model": MODEL,
        "base_url": f"{ADDRESS}/v1/completions",
        "tokenizer": TOKENIZER,
        "num_concurrent": 2,
        "max_retries": 1,
        **arguments,
    }
    command = [
        *(PROGRAMS / "lm_eval", "--model", "local-completions", "--tasks", task, "--include_path", folder),
        *("--model_args", ",".join(f"{name}={value}" for name, value in model.items())),
        *("--batch_size", "3", "--output_path", folder / "out", "--log_samples"),
    ]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(WORK / "hf")}
    done = subprocess.run(command, env=offline, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (log,) = Path(folder, "out").rglob("samples_*.jsonl")
    return [json.loads(line) for line in log.read_text().splitlines()]


@check
def a_generating_task_has_an_answer_to_every_sample() -> None:
    samples = evaluate("evenflow_generate", _GENERATE)
    assert len(samples) == len(lm_eval_data.SAMPLES)
    answers = {sample["doc"]["question"]: sample["resps"][0][0] for sample in samples}
    assert "Paris" in answers["The capital of France is"]


def compare(samples: list[dict[str, Any]]) -> None:
    expected: dict[str, list[list[Any]]] = json.loads((WORK / "expected.json").read_text())
    assert len(samples) == len(lm_eval_data.SAMPLES)
    worst = 0.0
    for sample in samples:
        found = [response[0] for response in sample["resps"]]
        for (logprob, is_greedy), (wanted, would_be_greedy) in zip(
            found, expected[sample["doc"]["question"]], strict=True
        ):
            worst = max(worst, abs(float(logprob) - wanted))
            assert (str(is_greedy) == "True") == would_be_greedy, sample
    print(f"         largest difference of a loglikelihood: {worst:.5f}")
    assert worst < _TOLERANCE


@check
def loglikelihoods_by_token_ids_equal_the_engines_own() -> None:
    compare(evaluate("evenflow_choose", _CHOOSE, tokenized_requests="True"))


@check
def loglikelihoods_by_text_equal_the_engines_own() -> None:
    compare(evaluate("evenflow_choose", _CHOOSE, tokenized_requests="False"))


run_checks()
