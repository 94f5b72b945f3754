"""The tasks of a run: rows of files and datasets, tasksets by source, their order and buffer, and the episodes to run."""
