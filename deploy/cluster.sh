#!/usr/bin/env bash
# Runs a command in a Kubernetes cluster of three nodes on this machine: deploy/cluster.sh COMMAND…
#
# Control plane, kubelets and kube-proxies are Kubernetes' own, built by Go; containerd, runc and the network's plugins are Debian's; the
# image is that of the Dockerfile. All have processes, mounts and networks of their own, which end with the command: nothing listens outside.
# The command runs in the network of the first node, with kubectl and helm on its PATH. It needs root on Debian, and Go.
set -euo pipefail
cd "$(dirname "$0")/.."
kubernetes=v1.37.0
etcd=v3.7.0
work=$PWD/build/cluster
gateway=10.77.0.1
export KUBECONFIG=$work/run/kubeconfig PATH=$work/bin:$PWD/build/tools:$PATH

build() {
    mkdir -p "$work/go" "$work/bin" && cp deploy/cluster.go "$work/go/main.go"
    cd "$work/go" && [ -e go.mod ] || go mod init cluster 2>/dev/null
    folder=$(go mod download -json "k8s.io/kubernetes@$kubernetes" | sed -n 's/^\s*"Dir": "\(.*\)",$/\1/p')
    # Its own modules are folders of its repository; outside of it they are v0 of the same release.
    for module in $(sed -n 's#^\s\(k8s.io/[a-z-]*\) => ./staging.*#\1#p' "$folder/go.mod"); do
        go mod edit -replace "$module=$module@v0${kubernetes#v1}"
    done
    go mod edit -go 1.26.0 -godebug default=go1.26 -require "k8s.io/kubernetes@$kubernetes" -require "go.etcd.io/etcd/server/v3@$etcd"
    version=k8s.io/component-base/version # helm asks the cluster for it
    go build -mod=mod -p 2 -ldflags "-s -w -X $version.gitVersion=$kubernetes -X $version.gitMajor=1 -X $version.gitMinor=37" \
        -o "$work/bin/" . k8s.io/kubernetes/cmd/kubectl
    cd - >/dev/null
}

images() {
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends containerd runc containernetworking-plugins iptables >/dev/null
    mkdir -p "$work/pause"
    printf 'FROM halfway:dev\nENTRYPOINT ["sleep", "infinity"]\n' > "$work/pause/Dockerfile"
    tests/compose/engine.sh sh -ec "
        docker build --quiet --target coordinator --tag halfway:dev . && docker build --quiet --tag halfway:pause '$work/pause'
        docker save --output '$work/images.tar' halfway:dev halfway:pause"
}

until_true() { # SECONDS COMMAND…
    local end=$((SECONDS + $1)); shift
    until "$@" >/dev/null 2>&1; do [ $SECONDS -lt $end ] || { echo "not in time: $*"; return 1; }; sleep 1; done
}

start() { # NAME COMMAND…
    setsid "${@:2}" >"$work/run/$1.log" 2>&1 </dev/null &
}

control_plane() {
    local run=$work/run
    openssl genrsa -out "$run/accounts.key" 2048 2>/dev/null
    echo 'token-of-a-test,admin,admin,system:masters' > "$run/tokens.csv"
    cat > "$KUBECONFIG" <<EOF
{apiVersion: v1, kind: Config, current-context: test,
 clusters: [{name: test, cluster: {server: "https://$gateway:6443", insecure-skip-tls-verify: true}}],
 users: [{name: admin, user: {token: token-of-a-test}}],
 contexts: [{name: test, context: {cluster: test, user: admin}}]}
EOF
    start etcd cluster etcd --data-dir "$run/etcd" --unsafe-no-fsync
    start apiserver cluster apiserver --etcd-servers http://127.0.0.1:2379 --service-cluster-ip-range 10.96.0.0/16 --authorization-mode RBAC \
        --advertise-address $gateway --cert-dir "$run/certificates" --token-auth-file "$run/tokens.csv" --kubelet-preferred-address-types InternalIP \
        --service-account-issuer https://test --service-account-key-file "$run/accounts.key" --service-account-signing-key-file "$run/accounts.key"
    until_true 180 kubectl get --raw /readyz
    start controllers cluster controllers --kubeconfig "$KUBECONFIG" --leader-elect=false --service-account-private-key-file "$run/accounts.key" \
        --root-ca-file "$run/certificates/apiserver.crt"
    start scheduler cluster scheduler --kubeconfig "$KUBECONFIG" --leader-elect=false
}

add_node() { # NUMBER: its network and cgroups, and then all that runs on it
    local name=node$1 folder
    ip netns add "$name"
    ip link add "$name" type veth peer name eth0 netns "$name" && ip link set "$name" master bridge up
    ip route add "10.78.$1.0/24" via "10.77.0.1$1"
    for folder in $(findmnt --raw --noheadings --output TARGET --types cgroup,cgroup2); do
        mkdir -p "$folder/halfway-test/$name"
        [ ! -e "$folder/cpu.shares" ] || echo 20480 > "$folder/halfway-test/cpu.shares" # else all pods weigh as much as one process
    done
    start "$name" nsenter --net="/run/netns/$name" unshare --mount --uts "$0" --node "$1"
}

run_node() { # NUMBER
    local name=node$1 own=$work/run/node$1 want
    hostname "$name" && ip link set lo up && ip link set eth0 up
    ip address add "10.77.0.1$1/24" dev eth0 && ip route add default via $gateway
    echo 1 > /proc/sys/net/ipv4/ip_forward
    mkdir -p "$own/var/lib" "$own/cni" && ln -s /run "$own/var/run"
    for want in vm/overcommit_memory:1 kernel/panic:10 kernel/panic_on_oops:1; do # else the kubelet sets them for the whole machine
        echo "${want#*:}" > "$own/${want##*/}" && mount --bind "$own/${want##*/}" "/proc/sys/${want%:*}"
    done
    mount --bind "$own/var" /var
    mount -t tmpfs tmpfs /run
    cat > "$own/cni/10-pods.conflist" <<EOF
{"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "bridge", "bridge": "pods", "isGateway": true, "hairpinMode": true,
  "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.78.$1.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
EOF
    cat > "$own/containerd.toml" <<EOF
version = 2
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "docker.io/library/halfway:pause"
restrict_oom_score_adj = true # for a root without CAP_SYS_RESOURCE
cni = {bin_dir = "/usr/lib/cni", conf_dir = "$own/cni"}
EOF
    cat > "$own/kubelet.yaml" <<EOF
kind: KubeletConfiguration
apiVersion: kubelet.config.k8s.io/v1beta1
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
failCgroupV1: false
cgroupDriver: cgroupfs
cgroupRoot: /halfway-test/$name
failSwapOn: false
evictionHard: {memory.available: 50Mi}
resolvConf: ""
EOF
    containerd --config "$own/containerd.toml" >"$own/containerd.log" 2>&1 &
    until_true 60 ctr version
    ctr --namespace k8s.io images import "$work/images.tar"
    cluster proxy --kubeconfig "$KUBECONFIG" --hostname-override "$name" --proxy-mode iptables --conntrack-max-per-core 0 \
        --conntrack-tcp-timeout-established 0 --conntrack-tcp-timeout-close-wait 0 >"$own/proxy.log" 2>&1 &
    exec cluster kubelet --kubeconfig "$KUBECONFIG" --config "$own/kubelet.yaml" --hostname-override "$name" --node-ip "10.77.0.1$1" \
        --node-labels "topology.kubernetes.io/zone=zone-$1"
}

inside() { # COMMAND…
    mkdir -p "$work/run"
    mount -t tmpfs tmpfs /run
    ip link set lo up && ip link add bridge type bridge && ip link set bridge up
    ip address add $gateway/24 dev bridge
    echo 1 > /proc/sys/net/ipv4/ip_forward
    control_plane
    for number in 1 2 3; do add_node $number; done
    for number in 1 2 3; do until_true 300 kubectl wait --for=condition=Ready node/node$number --timeout=1s; done
    nsenter --net=/run/netns/node1 "$@"
}

case ${1:-} in
--node) run_node "$2" ;;
--inside) inside "${@:2}" ;;
*)
    . deploy/tools.sh
    helm_tool
    build
    images
    rm -rf "$work/run"; status=0
    unshare --mount --net --pid --fork --kill-child --mount-proc "$0" --inside "$@" || status=$?
    find /sys/fs/cgroup -depth -type d -path '*/halfway-test*' -exec rmdir {} + 2>/dev/null || true
    exit $status
    ;;
esac
