"""The Python interface: train, evaluate and sample from a script or a notebook, and read what a run has left."""
