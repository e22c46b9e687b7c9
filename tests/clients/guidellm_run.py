"""guidellm: a small load of synthetic prompts, and its report."""

from __future__ import annotations

import json
import os
import subprocess

from checking import ADDRESS, MODEL, PROGRAMS, TOKENIZER, WORK, check, run_checks

NUM_REQUESTS = 12
NUM_OUTPUT_TOKENS = 8


def measure(request_format: str) -> None:
    report = WORK / f"{request_format.strip('/').replace('/', '_')}.json"
    command = [
        *(PROGRAMS / "guidellm", "run", "--disable-console-interactive"),
        *("--backend", f"kind=openai_http,target={ADDRESS},model={MODEL},request_format={request_format}"),
        *("--profile", "kind=concurrent,streams=4"),
        *("--data", f"kind=synthetic_text,prompt_tokens=40,output_tokens={NUM_OUTPUT_TOKENS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--output", f"kind=json,path={report}"),
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] == NUM_REQUESTS, totals
    assert not totals["errored"], totals
    for request in benchmark["requests"]["successful"]:
        assert request["output_tokens"] == NUM_OUTPUT_TOKENS, request


@check
def chats_are_measured_without_an_error() -> None:
    measure("/v1/chat/completions")


@check
def completions_are_measured_without_an_error() -> None:
    measure("/v1/completions")


run_checks()
