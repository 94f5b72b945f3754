"""Inference engines: client, fleet, launch, the embedded engine."""
