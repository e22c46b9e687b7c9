"""`evenflow` and `python -m evenflow`: the command line of this process.

Imports almost nothing itself, because an interrupt may arrive while the command is being imported.
"""

from __future__ import annotations

import sys

from evenflow.cli.interrupts import INTERRUPTED, exit_at_interrupt, raise_at_interrupt


def main() -> int:
    """Run the command and return its exit code."""
    raise_at_interrupt()
    try:
        from evenflow.cli.main import main as run_command

        return run_command()
    except KeyboardInterrupt:  # just before or after the command, which handles its own
        return INTERRUPTED
    finally:
        exit_at_interrupt()  # only modules and threads remain to be ended


if __name__ == "__main__":
    sys.exit(main())
