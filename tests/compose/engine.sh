#!/usr/bin/env bash
# Runs a command with a container engine and the images that docker-compose.yml names: tests/compose/engine.sh COMMAND…
#
# An engine that runs already is used. Otherwise root on Debian gets one of its own in build/engine: Debian's docker.io, compose as Go
# builds it. Images that no registry gives are replaced by stand-ins from Debian's packages and Maven's jars. Without an engine this
# says what it skips, and succeeds.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=tests/compose
work=${HALFWAY_TEST_ENGINE:-$PWD/build/engine}
compose=v2.40.3
skip() { echo "skipped: $*, so docker-compose.yml was not run"; exit 0; }

own_engine() {
    [ "$(id -u)" = 0 ] || skip "no container engine runs here, and only root can start one"
    command -v apt-get >/dev/null && command -v go >/dev/null || skip "no container engine runs here, and apt-get and go are needed for one"
    mkdir -p "$work/config/cli-plugins" "$work/go"
    export DOCKER_HOST=unix://$work/docker.sock DOCKER_CONFIG=$work/config DOCKER_BUILDKIT=0 COMPOSE_BAKE=false
    if ! command -v dockerd >/dev/null || ! command -v mmdebstrap >/dev/null; then
        export DEBIAN_FRONTEND=noninteractive
        apt-get update -qq
        apt-get install -y -qq --no-install-recommends docker.io mmdebstrap >/dev/null 2>&1 || skip "docker.io cannot be installed"
    fi
    if [ ! -x "$work/config/cli-plugins/docker-compose" ]; then
        echo "building docker compose"
        # `go install` refuses a module that excludes others.
        (
            cd "$work/go"
            [ -e go.mod ] || go mod init compose 2>/dev/null
            go get "github.com/docker/compose/v2/cmd@$compose" 2>/dev/null
            go build -p 2 -trimpath -ldflags "-s -w -X github.com/docker/compose/v2/internal.Version=$compose" \
                -o "$work/config/cli-plugins/docker-compose" github.com/docker/compose/v2/cmd
        )
    fi
    docker info >/dev/null 2>&1 && return
    rm -f "$work/docker.pid"
    setsid dockerd --host "$DOCKER_HOST" --data-root "$work/data" --exec-root "$work/exec" --pidfile "$work/docker.pid" \
        --storage-driver overlay2 >"$work/dockerd.log" 2>&1 </dev/null &
    trap 'kill "$(cat "$work/docker.pid")" 2>/dev/null || true' EXIT
    for _ in $(seq 60); do docker info >/dev/null 2>&1 && return; sleep 0.5; done
    tail -3 "$work/dockerd.log"
    skip "the engine does not start here ($work/dockerd.log)"
}

have() { # IMAGE
    docker image inspect "$1" >/dev/null 2>&1 || timeout 120 docker pull --quiet "$1" >/dev/null 2>&1
}

debian() { # IMAGE PACKAGES [OPTIONS of docker import]
    echo "a stand-in for $1, from Debian's packages"
    mmdebstrap --quiet --variant=minbase --include="$2" \
        --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
        --essential-hook='mkdir -p "$1/usr/share/man/man1"' \
        --customize-hook='test ! -x "$1/usr/bin/python3.11" || ln -s /usr/bin/python3.11 "$1/usr/local/bin/python"' \
        --customize-hook='cp /usr/local/share/ca-certificates/*.crt "$1/usr/local/share/ca-certificates/" 2>/dev/null && chroot "$1" update-ca-certificates >/dev/null || true' \
        bookworm - | docker import -c 'CMD ["bash"]' -c 'ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8' \
            -c 'LABEL halfway.stand-in=true' "${@:3}" - "$1" >/dev/null
}

docker info >/dev/null 2>&1 && docker compose version >/dev/null 2>&1 || own_engine
python=$(sed -n 's/^FROM \(python:[^ ]*\) AS base$/\1/p' Dockerfile)
kafka=$(sed -n 's/^ *image: \(apache\/kafka:.*\)/\1/p' docker-compose.yml | head -1)
balancer=$(sed -n 's/^ *image: \(haproxy:.*\)/\1/p' docker-compose.yml)
have "$python" || debian "$python" python3.11,python3.11-venv,ca-certificates -c 'ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt'
have "$balancer" || debian "$balancer" haproxy -c 'USER haproxy' -c 'CMD []' -c 'ENTRYPOINT ["haproxy", "-W", "-db", "-f", "/usr/local/etc/haproxy/haproxy.cfg"]'
if ! have "$kafka"; then
    docker image inspect halfway-java:17 >/dev/null 2>&1 || debian halfway-java:17 openjdk-17-jre-headless
    mkdir -p build/kafka-image && cp -r $here/kafka-image/. build/kafka-image && rm -rf build/kafka-image/libs
    .venv/bin/python $here/fetch_kafka.py build/kafka-image/libs
    docker build --quiet --tag "$kafka" build/kafka-image >/dev/null 2>&1
fi
"$@"
