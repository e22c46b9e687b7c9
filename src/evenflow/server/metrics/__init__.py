"""What is measured of steps and requests."""
