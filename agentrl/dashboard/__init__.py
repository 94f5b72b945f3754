"""The dashboard, ``agentrl view --serve``: a local web page of all runs under a folder, live while they train."""
