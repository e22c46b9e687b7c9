"""Steers the steps of host engines such as vLLM: what does not depend on which one it is."""
