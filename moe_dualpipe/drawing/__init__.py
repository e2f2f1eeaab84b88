"""Text, figures, traces and web pages of schedules, runs and profiles. training/ and commands/ import this package."""
