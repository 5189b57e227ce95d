"""An order service to deploy: for gunicorn (`wsgi`), uvicorn (`asgi`) and Celery (`celery_app`), in two releases.

Its environment has HALFWAY_URL, GROUP, TOPICS (one for each release, with a space between), DATABASE_URL of SQLAlchemy,
RELEASE_FILE (what a new process reads its release from), QUEUE (a folder) and CHECK_URL.
"""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

from sqlalchemy import text

from halfway.client import Halfway, Message, SyncHalfway, join_starlette
from halfway.client.barrier import AsyncBarrier, Barrier

SOON = {"first_check_after_s": 0.5, "check_interval_s": 0.5}
INSERT = text("INSERT INTO orders VALUES (:order)")
KILLED = "killed"
"""An order whose process is killed in its local transaction."""


class Release:
    """What is the same in all of them."""

    def __init__(self) -> None:
        self.number = int(Path(os.environ["RELEASE_FILE"]).read_text())
        self.topic = os.environ["TOPICS"].split()[self.number]
        self.halfway = os.environ["HALFWAY_URL"], os.environ["GROUP"]
        self.database = os.environ["DATABASE_URL"]

    def message(self, order: str) -> Message:
        return Message(topic=self.topic, key=order, value={"order": order})

    @property
    def answer(self) -> str:
        return f"{self.number} {os.getpid()}"


class ThreadedService:
    """What gunicorn and Celery run."""

    def __init__(self) -> None:
        from sqlalchemy import NullPool, create_engine

        self._release = Release()
        self._engine = create_engine(self._release.database, poolclass=NullPool)  # none of its connections is forked
        self._barrier = Barrier(self._engine.dialect.name, self._engine.begin)
        self._barrier.create()
        self._halfway = SyncHalfway(*self._release.halfway, barrier=self._barrier)

    def start(self) -> None:
        self._halfway.start(topics=[self._release.topic], policy=SOON)

    def place(self, order: str) -> str:
        with self._halfway.transaction([self._release.message(order)], self._engine.begin) as connection:
            connection.execute(INSERT, {"order": order})
            if order == KILLED:
                os.kill(os.getpid(), signal.SIGKILL)
        return self._release.answer


def wsgi() -> Any:
    """Return the application of gunicorn; each worker makes its own."""
    service = ThreadedService()
    service.start()

    def application(environ: Any, start_response: Any) -> Any:
        answer = service.place(environ["PATH_INFO"].removeprefix("/orders/"))
        start_response("201 Created", [("Content-Type", "text/plain"), ("Content-Length", str(len(answer)))])
        return [answer.encode()]

    return application


def asgi() -> Any:
    """Return the application of uvicorn."""
    from fastapi import FastAPI
    from sqlalchemy.ext.asyncio import create_async_engine

    release = Release()
    engine = create_async_engine(release.database)
    barrier = AsyncBarrier(engine.dialect.name, engine.begin)
    halfway = Halfway(*release.halfway, barrier=barrier)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await barrier.create()
        yield
        await engine.dispose()

    app = FastAPI(lifespan=lifespan)
    join_starlette(app, halfway, topics=[release.topic], check_url=os.environ["CHECK_URL"], policy=SOON)

    @app.post("/orders/{order}", status_code=201)
    async def place(order: str) -> str:
        async with halfway.transaction([release.message(order)], engine.begin) as connection:
            await connection.execute(INSERT, {"order": order})
        return release.answer

    return app


def queue(folder: Path) -> Any:
    """Return an application of Celery whose queue is in a folder."""
    from celery import Celery

    for name in ("messages", "control"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    app = Celery("shop", broker="filesystem://")
    app.conf.broker_transport_options = {
        "data_folder_in": str(folder / "messages"),
        "data_folder_out": str(folder / "messages"),
        "control_folder": str(folder / "control"),
    }
    return app


@cache
def _celery() -> Any:
    """Return the application of Celery: its parent starts the client, and the forked processes use it."""
    from celery.signals import worker_init

    app, service = queue(Path(os.environ["QUEUE"])), ThreadedService()
    app.task(service.place, name="place")
    worker_init.connect(lambda **_: service.start(), weak=False)
    return app


def __getattr__(name: str) -> Any:
    if name == "celery_app":
        return _celery()
    raise AttributeError(name)
