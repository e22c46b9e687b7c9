"""CPU kernels in C++, how they are compiled, and calls of them. Callers run on torch if there are none."""
