"""The Megatron-Core learner: models, conversion of weights, parallel layouts."""
