# Sourced: tools that are not on the PATH are built by Go into build/tools, for minutes the first time.
export GOBIN=$PWD/build/tools
export PATH=$GOBIN:$PATH

tool() { # NAME MODULE@VERSION
    command -v "$1" >/dev/null || { echo "building $1"; go install "$2"; }
}

helm_tool() {
    tool helm helm.sh/helm/v3/cmd/helm@v3.22.0
}

helm_unittest_tool() { # it is built in its own folder: `go install` of a module with a replacement is refused
    command -v helm-unittest >/dev/null && return
    echo "building helm-unittest"
    module=$(go mod download -json github.com/helm-unittest/helm-unittest@v1.1.2 | sed -n 's/^\s*"Dir": "\(.*\)",$/\1/p')
    go install -C "$module" ./cmd/helm-unittest
}
