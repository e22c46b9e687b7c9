"""The example runs as it is written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "advise.py"


def test_advise(tmp_path: Path) -> None:
    data = tmp_path / "data.csv"
    data.write_text("ContextTokens\n" + "24000\n" * 20)
    command = [sys.executable, str(EXAMPLE), str(data), "0.26"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[0].startswith("data.csv: always, because every input is over 2,048 tokens")
    assert "'long_prefill_token_threshold': 2048" in lines[1]
    assert len(lines) == 4
