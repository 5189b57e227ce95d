#!/usr/bin/env bash
# Pins the images of others to the digests that their tags have now: packaging/pin_images.sh [FILE…], by default Dockerfile and
# docker-compose.yml. Run it again to follow the tags. Needs a registry that can be reached, and crane or Go.
set -euo pipefail
cd "$(dirname "$0")/.."
. deploy/tools.sh
tool crane github.com/google/go-containerregistry/cmd/crane@v0.22.1
[ $# -gt 0 ] || set -- Dockerfile docker-compose.yml
images=$(sed -nE 's/^(FROM|[[:space:]]+image:) +"?([^ "@]+:[^ "@]+).*/\2/p' "$@" | grep -vE '^halfway(-[a-z]+)?:' | sort -u)
pins=()
for image in $images; do
    digest=$(crane digest "$image")
    echo "$image@$digest"
    pins+=(-e "s#(^FROM +|image: +\"?)${image//./\\.}(@sha256:[0-9a-f]+)?([ \"]|\$)#\1$image@$digest\3#")
done
sed -i -E "${pins[@]}" "$@" # all or nothing
