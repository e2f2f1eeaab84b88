"""What a model costs before it runs: FLOPs, activations, and the memory of every rank."""
