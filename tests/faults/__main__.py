"""`python -m tests.faults [--in DIRECTORY] ARGUMENTS…`: the command line of halfway, with fault points."""

import sys
from pathlib import Path

from halfway.app.cli import main as cli
from tests.faults.injection import Injection
from tests.faults.plan import Faults

if __name__ == "__main__":
    if sys.argv[1:2] == ["--in"]:
        Injection(Faults(Path(sys.argv[2]))).install()
        del sys.argv[1:3]
    cli.main()
