#!/bin/sh
# make_venv.sh FOLDER: make a virtual environment with the first Python that is new enough and complete.
# $PYTHON, when set, is the only candidate.
set -eu
folder=$1

# One whose installation was finished is kept; pip brings it up to date.
if [ -e "$folder/ready" ] && "$folder/bin/python" -c 'import pip' >/dev/null 2>&1; then
    exit 0
fi

usable() {  # a shim or a Debian Python without its venv package exists but cannot be used, so try it
    "$1" -c 'import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info[:2])' >/dev/null 2>&1
}

for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14 python}; do
    if usable "$candidate"; then
        echo "Making $folder with $("$candidate" --version) ($(command -v "$candidate"))"
        exec "$candidate" -m venv --clear "$folder"
    fi
done

{
    echo "Ropewalk needs Python 3.11 or newer, with its venv and ensurepip modules."
    if [ -n "${PYTHON:-}" ]; then
        echo "PYTHON=$PYTHON is not such a Python."
    else
        echo "None of python3, python3.11 ... python3.14 on the PATH is one; choose one with: make PYTHON=/path/to/python3.11"
    fi
    echo "(On Debian and Ubuntu the modules are in a package of their own: apt install python3-venv)"
} >&2
exit 1
