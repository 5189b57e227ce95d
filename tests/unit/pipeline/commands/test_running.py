"""An interruption of a job whose Spark is just starting."""

import logging
import signal
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from halfway.pipeline.commands import running


@pytest.mark.parametrize("late", [False, True], ids=["before Spark's own handler", "after it"])
def test_a_spark_that_is_interrupted_while_it_starts_is_stopped(
    late: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    stop, began = Mock(), Mock()

    def start() -> SimpleNamespace:
        if not late:
            signal.raise_signal(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as PySpark does
        if late:
            signal.raise_signal(signal.SIGINT)
        return SimpleNamespace(stop=stop)

    monkeypatch.setattr(running, "prepared", lambda *_, **__: start)
    options: dict[str, Any] = {"config": None, "master": None, "memory": None, "conf": (), "jars": ""}
    try:
        with (
            pytest.raises(SystemExit) as ended,
            running.opened("export", "spark", running.Places(output="x", topics=False), options),
        ):
            began()
    finally:
        signal.signal(signal.SIGINT, before)
        logging.disable(logging.NOTSET)
    assert (ended.value.code, stop.call_count, began.call_count) == (130, 1, 0)
    assert capsys.readouterr().err == "halfway-pipeline export: interrupted\n"
