"""Model families of the Megatron-Core learner, with their options and weights."""
