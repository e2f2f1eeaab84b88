"""Every picture and table: timelines, traces, curves, markdown. Imports values, never the rooms that use it."""
