"""The ops on CUDA devices: their kernel launches, and the compilation of kernels ahead of time."""
