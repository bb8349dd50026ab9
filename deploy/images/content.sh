#!/usr/bin/env bash
# What the CPU image holds beside its system: an environment that scripts/setup.sh has built, moved to /opt/rlhfless/venv,
# and rlhfless in it, installed for good. Run inside the image, from the repository's root:
#
#   deploy/images/content.sh ENVIRONMENT
set -euo pipefail
built=$1
home=/opt/rlhfless

mkdir -p "$home"
mv "$built" "$home/venv"
cd "$home/venv"
# Its interpreter and its path are other ones now. What is changed is replaced and never written to: the files may be
# links to those of an environment that is in use.
rm -rf pyvenv.cfg .complete .checkout bin/python* bin/[Aa]ctivate*
python3 -m venv --without-pip .
grep -lIE '^#!/.*/bin/python[0-9.]*$' bin/* | xargs sed -i "1s|.*|#!$home/venv/bin/python|"
cd - >/dev/null
cp -r examples "$home/"
"$home/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-cache-dir --no-deps --no-build-isolation \
    --force-reinstall .
