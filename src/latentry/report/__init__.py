"""What a run shows: its progress while it works, and its result when it ends."""
