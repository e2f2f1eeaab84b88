"""The commands of the console script, a file for each or for a group. Invalid values raise ValueError with one line."""
