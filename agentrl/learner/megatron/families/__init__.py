"""Model families of the Megatron-Core learner: one file each, with its options and its weights."""
