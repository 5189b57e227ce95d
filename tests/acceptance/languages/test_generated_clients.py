"""Clients that other people's generators make of the OpenAPI document compile, with what a user writes around them."""

import shutil

from halfway.http.handlers.openapi import encoded
from tests.support.conformance.services import BUILD, ROOT, run_go, run_node, with_npm

GENERATORS = ROOT / "tests" / "support" / "conformance" / "generators"


def test_a_typescript_client_compiles() -> None:
    folder = with_npm(GENERATORS / "typescript")
    (folder / "openapi.json").write_bytes(encoded())
    generator = "node_modules/openapi-typescript/bin/cli.js"
    run_node(folder, generator, "openapi.json", "-o", "api.d.ts", failure="no types are generated")
    run_node(folder, "node_modules/typescript/bin/tsc", failure="the types do not fit")


def test_a_go_client_compiles() -> None:
    folder = BUILD / "generators" / "go"
    (folder / "client").mkdir(parents=True, exist_ok=True)
    for file in (GENERATORS / "go").iterdir():
        shutil.copy(file, folder)
    (folder / "openapi.json").write_bytes(encoded())
    generator = "github.com/oapi-codegen/oapi-codegen/v2/cmd/oapi-codegen"
    run_go(folder, "run", generator, "-config", "oapi-codegen.yaml", "openapi.json", failure="no client is generated")
    run_go(folder, "build", "-o", "program", ".", failure="the client does not fit")
