"""Checkpoints: saved in the background, verified before they are loaded, exported as safetensors."""
