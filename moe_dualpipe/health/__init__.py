"""What a run does when something fails: dead or hanging ranks, signals, steps without a finite loss."""
