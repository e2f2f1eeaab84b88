"""Instruments that read what a run wrote, this project's or anyone else's. Only commands import them."""
