"""The example runs as it is written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from evenflow.cli.main import main

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "advise.py"


LENGTHS = {"always": [24_000] * 20, "selective": [47] * 10 + [8000] * 10, "disabled": [47] * 20}


@pytest.mark.parametrize(("decision", "lengths"), LENGTHS.items(), ids=LENGTHS)
def test_the_example_and_the_command_agree(
    decision: str, lengths: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.csv"
    data.write_text("ContextTokens\n" + "".join(f"{length}\n" for length in lengths))
    example = [sys.executable, str(EXAMPLE), str(data), "0.26"]
    first, second, *_ = subprocess.run(example, capture_output=True, text=True, check=True).stdout.splitlines()
    assert main(["analyze", str(data), "--vllm-version", "0.26", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert first == f"data.csv: {decision}, because {report['reason']}"
    assert second == f"EngineArgs(model=..., **{report['vllm']['engine_args']})"
    args = report["vllm"]["engine_args"]
    if decision == "selective":
        assert f"use chunks of {args['long_prefill_token_threshold']:,} tokens" in err
    if decision == "always":
        assert f"use chunks of {args['max_num_batched_tokens'] - 64:,} tokens" in err  # without the decodes' 64
    assert ("Chunks help inputs over" in err) == (decision != "disabled")
