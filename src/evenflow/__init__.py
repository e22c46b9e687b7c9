"""evenflow serves language models so that no stream stalls."""
