"""The `evenflow` command: one file per command; `--help` imports no torch."""
