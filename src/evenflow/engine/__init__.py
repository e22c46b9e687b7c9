"""The loop around the scheduler, and the Python API on top of it."""
