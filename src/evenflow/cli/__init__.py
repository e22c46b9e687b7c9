"""The `evenflow` command: one file a command; `--help` imports no torch."""
