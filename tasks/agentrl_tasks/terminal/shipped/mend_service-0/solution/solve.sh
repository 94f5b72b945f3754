#!/bin/sh
set -e
cd /work
sed -i 's/plum.json/config.json/' /work/server.py
sed -i 's/owner/name/' /work/server.py
