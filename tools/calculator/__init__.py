"""Arithmetic, exactly."""
