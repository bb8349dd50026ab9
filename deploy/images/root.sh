#!/usr/bin/env bash
# The content of the CPU image in a folder, where no container engine is at hand; any tool may pack it then. As root:
#
#   deploy/images/root.sh BASE.tar FOLDER
#   deploy/images/root.sh --key             only print a hash of the content
#
# BASE.tar is an image of a Debian whose Python is that of the environment (scripts/setup.sh), with the packages of
# cpu.Dockerfile. Settings that a folder cannot hold are the user's to give: PATH=/opt/rlhfless/venv/bin:/usr/bin:/bin.
set -euo pipefail
cd "$(dirname "$0")/../.."
content=(pyproject.toml README.md rlhfless functions sim examples deploy/images)
if [ "$1" = --key ]; then
    {
        scripts/setup.sh --path
        find "${content[@]}" -type f ! -path '*/__pycache__/*' -print0 | sort -z | xargs -0 sha256sum
    } | sha256sum
    exit
fi
base=$1 root=$2

environment=$(scripts/setup.sh)
mkdir -p "$root/src"
tar -xOf "$base" layer.tar | tar -C "$root" -xf -
# On the same file system its 6.6 GB are linked.
cp -al "$environment" "$root/built" 2>/dev/null || { rm -rf "$root/built"; cp -a "$environment" "$root/built"; }
tar -cf - "${content[@]}" | tar -C "$root/src" -xf -
chroot "$root" sh -c 'cd /src && deploy/images/content.sh /built'
rm -rf "$root/src"
