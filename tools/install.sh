#!/bin/sh
# install.sh FOLDER REQUIREMENT WHAT: install into a virtual environment, showing pip's output only if it fails.
set -eu
log=$1/pip.log
echo "Installing $3 into $1 (a minute or so; pip writes to $log) ..."
if ! "$1/bin/python" -m pip install --disable-pip-version-check --editable "$2" >"$log" 2>&1; then
    cat "$log" >&2
    echo "Installing $3 failed; the output of pip is above and in $log" >&2
    exit 1
fi
