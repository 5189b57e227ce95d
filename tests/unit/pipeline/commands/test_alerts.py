"""How the result of a job is reported."""

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import click
import pytest

from halfway.pipeline.commands.alerts import call_webhook, print_table, rule, webhook, write_metrics
from halfway.pipeline.commands.alerts import status as status_of
from halfway.pipeline.errors import PipelineError
from halfway.pipeline.jobs.audit import Summary
from halfway.pipeline.transforms.verdict import VERDICTS

COUNTS = {"committed_ok": 7, "leaked": 2, "parked": 1}
FOUND = Summary(
    verdicts=dict.fromkeys(VERDICTS, 0) | COUNTS,
    quarantined=3,
    by_group=[("committed_ok", "shop", 7), ("leaked", 'a "b"\n', 2), ("parked", "", 1)],
)
FINE = Summary(verdicts=dict.fromkeys(VERDICTS, 0), quarantined=0)
UNREAD = Summary(verdicts=dict.fromkeys(VERDICTS, 0) | {"not_judged": 1}, quarantined=0)


@pytest.mark.parametrize(
    "rules, summary, status",
    [
        ((), FOUND, 1),
        ((), FINE, 0),
        ((), UNREAD, 3),
        (("lost",), FOUND, 0),
        (("lost",), replace(FINE, differences=1), 1),
        ((), replace(FINE, differences=0), 0),
        (("lost",), UNREAD, 3),
        (("lost", "not_judged=2"), UNREAD, 0),
        (("lost", "leaked"), FOUND, 1),
        (("leaked=3",), FOUND, 0),
        (("committed_ok@shop=7",), FOUND, 1),
        (("committed_ok@other",), FOUND, 0),
    ],
)
def test_the_exit_status_is_for_what_was_asked(rules: tuple[str, ...], summary: Summary, status: int) -> None:
    """By verdict, group and count, or for any anomaly; then for what could not be judged, unless a rule names that."""
    assert status_of(list(map(rule, rules)), summary) == status


@pytest.mark.parametrize("text", ["missing", "lost=many", "lost@", "lost=0", ""])
def test_a_rule_that_is_none_is_named(text: str) -> None:
    with pytest.raises(click.BadParameter, match=re.escape(f"{text!r}: give verdict")):
        rule(text)


def test_figures_are_as_prometheus_reads_them(tmp_path: Path) -> None:
    """Whatever a group is called; the file is there whole or as it was."""
    many = replace(FOUND, quarantined=12_345_678, provable_since={"orders": 1_700_000_000_000, "mails": 0})
    write_metrics(many, str(tmp_path / "audit.prom"), at_ms=1_700_000_000_500, seconds=2.5)
    lines = (tmp_path / "audit.prom").read_text().splitlines()
    assert 'halfway_audit_transactions{group="a \\"b\\"\\n",verdict="leaked"} 2.0' in lines
    assert "halfway_audit_timestamp_seconds 1.7000000005e+09" in lines
    assert "halfway_audit_quarantined_records 1.2345678e+07" in lines
    assert 'halfway_audit_provable_since_seconds{topic="orders"} 1.7e+09' in lines
    assert 'halfway_audit_provable_since_seconds{topic="mails"} 0.0' in lines
    assert not any("differences" in line for line in lines)
    write_metrics(replace(FOUND, differences=4), str(tmp_path / "audit.prom"), at_ms=0, seconds=0)
    assert "halfway_audit_differences 4.0" in (tmp_path / "audit.prom").read_text().splitlines()
    assert [file.name for file in tmp_path.iterdir()] == ["audit.prom"]
    with pytest.raises(PipelineError, match="--metrics"):
        write_metrics(FOUND, str(tmp_path / "none" / "audit.prom"), at_ms=0, seconds=0)


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    """Return a server that accepts posts at / and redirects at /moved. `bodies` has what it got."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200 if self.path == "/" else 307)
            self.send_header("Location", "/")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    made = HTTPServer(("127.0.0.1", 0), Handler)
    vars(made)["bodies"] = bodies
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def test_a_webhook_gets_counts_and_anomalies_and_nobody_else_does(server: HTTPServer) -> None:
    """A redirect is not followed, and no error has the address."""
    url = f"http://127.0.0.1:{server.server_port}"
    anomalies = [{"id": f"id-{n}", "group": "g", "verdict": "leaked"} for n in range(2)]
    call_webhook(f"{url}/", replace(FOUND, differences=4), anomalies)
    [body] = vars(server)["bodies"]
    told = json.loads(body)
    assert told["verdicts"]["leaked"] == 2
    assert told["differences"] == 4
    assert told["anomalies"] == anomalies
    with pytest.raises(PipelineError, match="307") as refused:
        call_webhook(f"{url}/moved?token=secret", FOUND, anomalies)
    assert "secret" not in str(refused.value)
    assert len(vars(server)["bodies"]) == 2, "the second was not sent on"


def test_why_a_webhook_took_nothing_is_told(server: HTTPServer) -> None:
    """Without the address."""
    server.shutdown()
    server.server_close()
    with pytest.raises(PipelineError, match="Connection refused") as refused:
        call_webhook(f"http://127.0.0.1:{server.server_port}/?token=secret", FOUND, [])
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "https://", "example.com", "http://[::", "http://a:b/", "http://user:secret@a/"]
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(click.BadParameter, match=r"give an address") as refused:
        webhook(url)
    assert "secret" not in str(refused.value)


def test_a_name_that_others_wrote_is_shown_and_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a record in the internal topics that is not halfway's."""
    print_table(["group", "pending"], [["shop", "1"], ["\x1b]0;title\x07\nno row \u202e", "12"]])
    heading, first, second = capsys.readouterr().out.splitlines()
    assert first.split() == ["shop", "1"]
    assert second.isprintable()
    assert r"\x1b]0;title\x07\nno row \u202e" in second
    assert len(heading) == len(first) == len(second)
