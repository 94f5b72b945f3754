"""Process groups for weight transfer, and their network interface."""
