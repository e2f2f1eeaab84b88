"""moe-dualpipe: train Mixture-of-Experts transformers under DeepSeek's DualPipe schedule, anywhere."""

__version__ = "0.1.0"
