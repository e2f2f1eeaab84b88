"""Triton kernels and their launchers, for NVIDIA and AMD GPUs. No autograd, and no validation of inputs.

The operators in the parent package validate inputs, choose between Triton and plain torch, and import this package only
if they choose Triton. So they work without triton installed.
"""
