"""Benchmarks behind `agentrl bench`."""
