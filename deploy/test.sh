#!/usr/bin/env bash
# Tests the chart, the alerts and the workflow with the tools that read them. The schemas of Kubernetes come in a package of Python.
set -euo pipefail
cd "$(dirname "$0")/.."
. deploy/tools.sh
tool actionlint github.com/rhysd/actionlint/cmd/actionlint@v1.7.12
helm_tool
helm_unittest_tool
tool kubeconform github.com/yannh/kubeconform/cmd/kubeconform@v0.8.0
tool promtool github.com/prometheus/prometheus/cmd/promtool@v0.316.0
versions=(1.30.0 1.36.0)
schemas=$PWD/build/schemas
if [ ! -d "$schemas" ]; then
    .venv/bin/uv pip install --quiet --target build/kubernetes kubernetes-validate==1.37.0
    for version in "${versions[@]}"; do
        mkdir -p "$schemas/$version"
        cp "build/kubernetes/kubernetes_validate/kubernetes-json-schema/v$version-local-strict/"*.json "$schemas/$version"
        # They name themselves by addresses: here they are files.
        sed -i 's#"/api/_definitions.json#"_definitions.json#; s#"\$id":#"x-id":#' "$schemas/$version/"*.json
    done
fi

actionlint
promtool check rules deploy/prometheus/halfway.rules.yml
promtool test rules deploy/prometheus/halfway.rules.test.yml
chart=deploy/chart/halfway
for values in $chart/ci/*-values.yaml; do
    helm lint --strict --quiet --kube-version 1.30.0 $chart --values "$values"
    for version in "${versions[@]}"; do
        # The resources of operators have no schema in Kubernetes.
        helm template halfway $chart --namespace shop --kube-version "$version" --values "$values" \
            | kubeconform -strict -summary -kubernetes-version "$version" -skip ServiceMonitor,PrometheusRule,KafkaUser \
                -schema-location "$schemas/$version/{{ .ResourceKind }}{{ .KindSuffix }}.json"
    done
done
helm-unittest $chart
.venv/bin/python -m pytest -q -n 0 deploy/test_chart.py "$@"

# Images are pinned, as a registry has them.
tool crane github.com/google/go-containerregistry/cmd/crane@v0.22.1
.venv/bin/python -m pytest -q -n 0 deploy/test_images.py

# Each alert fires in its fault, and none in the demo.
.venv/bin/python -m pytest -q -n 0 -p tests.conftest -p tests.acceptance.conftest deploy/test_alerts.py

# The trace of a killed coordinator, in OpenTelemetry's own collector.
go build -C tests/support/collector -o "$GOBIN/collector" .
HALFWAY_TEST_COLLECTOR=$GOBIN/collector .venv/bin/python -m pytest -q -n 0 tests/acceptance/operator/test_traces.py
