"""Runs on clusters: scripts and manifests for Slurm, Kubernetes, SkyPilot and machines reached by ssh, from templates."""
