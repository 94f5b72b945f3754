#!/bin/sh
# The working folder has come from the agent's container; its programs run as nobody, and only root writes the reward.
if python3 -I -S /tests/check.py; then reward=1; else reward=0; fi
mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
