"""Contracts and data types that every other package builds on: environments, tools, tasks, messages, errors."""
