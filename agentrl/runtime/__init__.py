"""What training, evaluation and sampling share: running services, checks, task order, run folder."""
