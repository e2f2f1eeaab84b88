"""Machines for tests, simulated on a CPU: GPUs with streams, CUDA graphs, one-sided memory, Triton, and DeepEP."""
