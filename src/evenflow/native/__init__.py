"""CPU kernels in C++, their compilation and bindings. Callers use torch where there are no kernels."""
