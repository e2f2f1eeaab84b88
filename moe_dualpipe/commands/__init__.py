"""The commands of the console script, one group per file. Invalid values raise ValueError with a one-line message."""
