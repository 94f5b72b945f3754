"""A run's rollouts for people: in the terminal, and as one self-contained HTML page."""
