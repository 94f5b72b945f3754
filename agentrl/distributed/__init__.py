"""Process groups for weight transfer, and the network interface they use."""
