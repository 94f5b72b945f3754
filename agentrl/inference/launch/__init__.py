"""Engine processes."""
