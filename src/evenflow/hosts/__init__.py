"""Steers the steps of host engines such as vLLM: the code that is the same for all of them."""
