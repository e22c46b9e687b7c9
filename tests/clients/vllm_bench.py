"""vLLM's own `bench serve`, against completions and against chats."""

from __future__ import annotations

import json
import subprocess
import sys

from checking import ADDRESS, MODEL, TOKENIZER, WORK, check, run_checks

NUM_PROMPTS = 8
NUM_OUTPUT_TOKENS = 6

# As `vllm bench serve` does; the command itself does not start where vLLM was installed from a wheel of another name.
_BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def measure(backend: str, endpoint: str, num_openings: int) -> None:
    """`num_openings`: events before the first token, which vLLM takes for the first token."""
    command = [
        *(sys.executable, "-c", _BENCH_SERVE, "--backend", backend, "--base-url", ADDRESS, "--endpoint", endpoint),
        *("--model", MODEL, "--tokenizer", TOKENIZER, "--dataset-name", "random", "--num-prompts", str(NUM_PROMPTS)),
        *("--random-input-len", "40", "--random-output-len", str(NUM_OUTPUT_TOKENS), "--ignore-eos"),
        *("--save-result", "--save-detailed", "--result-dir", str(WORK), "--result-filename", f"{backend}.json"),
    ]
    done = subprocess.run(command, cwd=WORK, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((WORK / f"{backend}.json").read_text())
    assert result["completed"] == NUM_PROMPTS, result
    assert not any(result["errors"]), result["errors"]
    assert result["output_lens"] == [NUM_OUTPUT_TOKENS] * NUM_PROMPTS, result["output_lens"]
    assert all(len(gaps) == NUM_OUTPUT_TOKENS - 1 + num_openings for gaps in result["itls"]), result["itls"]


@check
def completions_are_measured_without_an_error() -> None:
    measure("openai", "/v1/completions", num_openings=0)


@check
def chats_are_measured_without_an_error() -> None:
    measure("openai-chat", "/v1/chat/completions", num_openings=1)


run_checks()
