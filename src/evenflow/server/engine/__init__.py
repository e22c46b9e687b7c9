"""The engine's process, and the front's side of it."""
