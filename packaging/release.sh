#!/usr/bin/env bash
# Builds what a release consists of into dist/, and tries it in empty environments: both distributions of Python, the chart, a software
# bill of materials and checksums. Needs Go unless helm is installed.
set -euo pipefail
cd "$(dirname "$0")/.."
. deploy/tools.sh
helm_tool
bin=$PWD/.venv/bin
chart=deploy/chart/halfway
fail() { echo "$*" >&2; exit 1; }

# --- one version
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
for found in "packaging/client/pyproject.toml $(sed -n 's/^version = "\(.*\)"/\1/p' packaging/client/pyproject.toml)" \
    "$chart/Chart.yaml:version $(sed -n 's/^version: //p' $chart/Chart.yaml)" \
    "$chart/Chart.yaml:appVersion $(sed -n 's/^appVersion: //p' $chart/Chart.yaml)"; do
    [ "${found#* }" = "$version" ] || fail "pyproject.toml has version $version, but ${found% *} has ${found#* }: give them one"
done
grep -q "^## \[$version\]" CHANGELOG.md || echo "CHANGELOG.md has no section [$version] yet: give it one before you publish"

# --- the distributions, with the time of the commit in them, so that the same commit gives the same bytes
rm -rf dist build/release
mkdir -p dist build/release
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || echo 1577836800)
export SOURCE_DATE_EPOCH
log=$PWD/build/release/build.log
build() { # PROJECT DIRECTORY
    (cd "$1" && "$bin/python" -m hatchling build --target sdist --target wheel --directory "$2" >"$log" 2>&1) || fail "$(cat "$log")"
}
for project in . packaging/client; do
    build "$project" "$PWD/dist"
    build "$project" "$PWD/build/release/again"
done
for file in build/release/again/*; do
    cmp -s "$file" "dist/${file##*/}" || fail "${file##*/}: two builds differ"
done
[ "$(ls dist | wc -l)" = 4 ] || fail "expected two sdists and two wheels: $(ls dist)"

# --- the chart, from its package
helm package --destination dist $chart >"$log" 2>&1 || fail "$(cat "$log")"
for values in $chart/ci/*-values.yaml; do
    helm template halfway "dist/halfway-$version.tgz" --kube-version 1.30.0 --values "$values" >/dev/null
done

# --- empty environments, whose contents are the bill of materials
install() { # ENVIRONMENT ARGUMENTS
    "$bin/uv" pip install --quiet --python "build/release/$1/bin/python" "${@:2}"
}
try() { # ENVIRONMENT COMMAND
    (cd build/release && "$1/bin/$2" "${@:3}")
}
for name in halfway client sbom; do "$bin/uv" venv --quiet --python "$bin/python" "build/release/$name"; done
install halfway --no-deps --require-hashes --requirement requirements/runtime.txt
install halfway --no-deps --no-index --find-links dist "halfway==$version"
[ "$(try halfway halfway --version)" = "halfway, version $version" ] || fail "halfway --version: $(try halfway halfway --version)"
try halfway python -I -c "import halfway.app.serve.app, halfway.kafka.lane.lane"
install client --constraint requirements/all.txt "dist/halfway_client-$version-py3-none-any.whl"
try client python -I -c "import halfway.client; from importlib.metadata import version; assert version('halfway-client') == '$version'"
install sbom cyclonedx-bom==7.5.0
"build/release/sbom/bin/cyclonedx-py" environment --pyproject pyproject.toml --output-reproducible --validate \
    --output-file "dist/halfway-$version.cdx.json" build/release/halfway
"$bin/python" - "dist/halfway-$version.cdx.json" requirements/runtime.txt "$PWD" <<'PYTHON'
import json, re, sys
from pathlib import Path

text = Path(sys.argv[1]).read_text()
listed = {(re.sub(r"[-_.]+", "-", one["name"]).lower(), one["version"]) for one in json.loads(text)["components"]}
locked = re.findall(r"^([a-z0-9-]+)==([^ ;]+)", Path(sys.argv[2]).read_text(), re.MULTILINE)
missing = [name for name, version in locked if (name, version) not in listed and name not in ("colorama", "tzdata")]
assert not missing, f"the bill of materials lacks {missing}"
assert sys.argv[3] not in text, "the bill of materials names a folder of this machine"
print(f"the bill of materials lists {len(listed)} packages")
PYTHON

(cd dist && sha256sum -- * > SHA256SUMS)
cat dist/SHA256SUMS
