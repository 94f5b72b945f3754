"""The rollout viewer: in the terminal, and as a self-contained HTML page."""
