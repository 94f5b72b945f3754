#!/bin/sh
# Prints the state of the machine.
state=$(cat /work/teal/wheel.txt) || exit 1
echo "state: $state"
