"""Ways to forge a reward: what the agent does, and the test that it fools if it may."""
