"""The canary: attempts what a sandbox must prevent, before a server serves."""
