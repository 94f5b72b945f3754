"""Export of a learner's weights in buckets."""
