"""One file for each cause. `find(case)` returns what it finds, whatever the gain: diagnose.py drops small ones."""
