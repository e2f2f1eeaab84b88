"""The operators of a Mixture-of-Experts layer, each in plain torch and in Triton behind one autograd function.

Import an operator from its module, for example `from moe_dualpipe.kernels.experts import experts`. Everything that
needs triton is in gpu/, which is imported only when Triton is chosen (backend.py). options.py needs no torch.
"""
