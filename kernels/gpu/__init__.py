"""The Triton kernels and their launchers, for NVIDIA and AMD GPUs. Nothing here knows autograd; inputs are valid.

The operators one folder up check what users pass, choose between these and plain torch, and import this package only
when Triton was chosen: it needs triton, they do not.
"""
