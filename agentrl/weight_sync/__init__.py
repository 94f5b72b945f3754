"""Weight sync: transports from the learner into the engines."""
