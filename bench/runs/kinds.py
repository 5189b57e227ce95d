"""The type of the parser group that commands are added to."""

from __future__ import annotations

import argparse
from typing import TypeAlias

Kinds: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001 - it has no other name
