"""Recipes of ``rollout.agent.harness``: how known agent programs are started against the gateway's endpoints."""
