"""The CPU kernels written in C++, and how they get compiled. Whatever uses them runs without them too, on torch."""
