"""Train a model under a schedule: configuration, data, optimizer, checkpoints, and the loop that joins them."""
