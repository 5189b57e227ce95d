"""Runs the order service: `python -m examples.orders.serve --help`."""

import argparse
import json
import os
from pathlib import Path

from aiohttp import web

from examples.orders.service import OrderService


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument("--check-url", help="the URL of /check for halfway, if it differs from the address above")
    parser.add_argument("--database", type=Path, default=Path("orders.sqlite"))
    parser.add_argument("--halfway", default="http://127.0.0.1:8080")
    return parser


if __name__ == "__main__":
    arguments = command_line().parse_args()
    check_url = arguments.check_url or f"http://{arguments.host}:{arguments.port}/check"
    keys = json.loads(os.environ.get("ORDERS_KEYS", "{}"))  # by group, if halfway requires keys
    service = OrderService(arguments.database, arguments.halfway, check_url, keys)
    web.run_app(service.app, host=arguments.host, port=arguments.port, access_log=None, print=None)
