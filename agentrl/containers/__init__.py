"""Containers for agents: folders of container tasks, machines with a writable root, and grading in another container."""
