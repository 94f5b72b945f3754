"""What commands share that run episodes: services, tool servers, checks, signals, and the folder of a run."""
