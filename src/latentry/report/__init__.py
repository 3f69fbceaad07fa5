"""What a run shows when it is over."""
