"""The commands of the console script, one group a file; a mistake is a ValueError of one line."""
