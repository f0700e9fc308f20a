#!/bin/sh
# Make .venv with the first Python of at least 3.11 that is found (or $PYTHON), and install everything into it.
set -eu
cd "$(dirname "$0")/.."

for python in ${PYTHON:-python3.11 python3.12 python3.13 python3.14 python3}; do
    if "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        exec "$python" deploy/install.py "$@"
    fi
done

echo "Everbatch needs Python 3.11 or newer with its venv module (on Debian and Ubuntu: apt install python3-venv)." >&2
echo "Another Python can be named: make setup PYTHON=/path/to/python" >&2
exit 1
