"""Backends with a simulated network: their transfers take the time of a modeled link."""
