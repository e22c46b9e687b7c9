"""The engine process, and the front's side of it."""
