"""schemathesis: requests made from /openapi.json, good ones and bad ones, and every answer held against it."""

from __future__ import annotations

import os
import re
import subprocess

from checking import ADDRESS, PROGRAMS, WORK, check, run_checks

MAX_SECONDS = os.environ.get("EVENFLOW_SCHEMATHESIS_SECONDS", "120")


@check
def every_answer_is_as_the_schema_says() -> None:
    command = [
        *(PROGRAMS / "schemathesis", "run", f"{ADDRESS}/openapi.json", "--checks", "all", "--mode", "all"),
        # A body may be right in every field and yet be refused: a prompt too long, fields that exclude each other.
        *("--exclude-checks", "positive_data_acceptance"),
        *("--max-time", MAX_SECONDS, "--request-timeout", "60", "--continue-on-failure", "--seed", "1"),
        *("--generation-database", "none", "--suppress-health-check", "all", "--no-color"),
    ]
    done = subprocess.run(command, cwd=WORK, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[done.stdout.find("= FAILURES") :] + done.stderr
    print("        ", *re.findall(r"\d+ generated.*", done.stdout))


run_checks()
