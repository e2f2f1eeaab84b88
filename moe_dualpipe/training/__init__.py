"""A training run: options, checks, trainer, optimizer, metrics, and the loop that joins them."""
