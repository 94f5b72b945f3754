"""Weight sync: transports of weights from the learner to the engines."""
