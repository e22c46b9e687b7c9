"""The file that switches an engine's scheduler from one run's mode to the next, in whichever process it runs."""

from __future__ import annotations

MODE_VARIABLE = "EVENFLOW_BENCH_MODE_FILE"
