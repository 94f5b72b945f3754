"""Plans before a run: memory of learner and engines by part, and layouts that fit named GPUs."""
