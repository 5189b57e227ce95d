# Sourced: tools that are not on the PATH are built by Go into build/tools, for minutes the first time.
export GOBIN=$PWD/build/tools
export PATH=$GOBIN:$PATH

tool() { # NAME MODULE@VERSION
    command -v "$1" >/dev/null || { echo "building $1"; go install "$2"; }
}

helm_tool() {
    tool helm helm.sh/helm/v3/cmd/helm@v3.22.0
}
