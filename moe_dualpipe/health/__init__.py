"""Failures of a run: dead or hanging ranks, signals, steps with a non-finite loss."""
