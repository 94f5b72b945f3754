"""Short trials of training steps, the search for faster settings, and the file that it writes: ``agentrl tune``."""
