"""The planner against published runs and against runs on this machine."""
