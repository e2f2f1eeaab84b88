"""The commands of the console script, one subcommand or group of them a file. Invalid values raise ValueError with a one-line message."""
