"""The operators of kernels/ as a repository for Hugging Face's kernel hub: `python -m kernel_hub` writes it."""
