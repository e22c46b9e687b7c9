"""Compiles a model's step ahead of time: export, package, cache, check, run."""
