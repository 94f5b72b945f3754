#!/bin/sh
set -e
cd /work
printf 'def mean(values):\n    return %s\n' "sum(values) / len(values)" > /work/window.py
python3 test_window.py
