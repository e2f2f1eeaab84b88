"""The planner against published runs."""
