"""Tool calls in what a policy said, one format a file. Nothing that a policy writes makes them raise."""
