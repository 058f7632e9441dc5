"""`mpitp bench`, or a script, on hosts of network namespaces with slow links between them.

Run by scripts/bench_hosts and scripts/validate_cost_hosts only.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.hosts.hosts import HERE, job_command, limit_links, make_hosts


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench_hosts", description=__doc__)
    parser.add_argument("--ranks", default="1,1", metavar="N,N,...", help="ranks on each host; default 1,1")
    parser.add_argument("--rate", default="1gbit", metavar="RATE", help="of a host's link, as tc has it; default 1gbit")
    parser.add_argument("--script", metavar="FILE", help="a Python script to run instead of `mpitp bench`")
    parser.add_argument("words", nargs="*", help="what follows `mpitp bench`; default: train")
    args = parser.parse_args()
    ranks = tuple(int(count) for count in args.ranks.split(","))
    with tempfile.TemporaryDirectory() as folder:
        make_hosts(len(ranks), Path(folder))
        limit_links(len(ranks), args.rate)
        script = [str(Path(args.script).resolve()), *args.words] if args.script else []
        words = [str(HERE / "bound.py"), *(script or ["bench", *(args.words or ["train"])])]
        where = Path.cwd() if script else folder
        return subprocess.run(job_command(ranks, words), cwd=where, stdin=subprocess.DEVNULL).returncode


if __name__ == "__main__":
    sys.exit(main())
