"""The training run: sampling, batches, the trainer, GPU time sharing, replay, warm start."""
