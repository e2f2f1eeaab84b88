"""Faults in real runs on a CPU: does the profiler name them, and predict how much faster the run is without them?"""
