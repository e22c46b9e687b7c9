"""Metrics, logs and traces of steps and requests."""
