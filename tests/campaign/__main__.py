"""`python -m tests.campaign --n 1000 --seed 7 [--only AREA ...] [--workers 2] [--keep DIR]
[--repeat SEED:INDEX]`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from . import fork


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaign",
        description="Faults drawn from a seed, done to the commands; docs/campaign.md.",
    )
    parser.add_argument("--n", type=int, default=1000, help="faults (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=7, help="(default: %(default)s)")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="AREA",
        help="these areas alone; the faults of other areas are passed over",
    )
    parser.add_argument(
        "--workers", type=int, default=2, help="faults at one time (default: %(default)s)"
    )
    parser.add_argument("--keep", metavar="DIR", help="keep what was written, under DIR")
    parser.add_argument(
        "--repeat", metavar="SEED:INDEX", help="one fault alone; what it left is kept and named"
    )
    return parser.parse_args()


def main() -> int:
    """Runs the campaign; 1 where a fault was not answered well."""
    asked = arguments()
    cache = (
        Path(os.environ.get("COMPASS_CAMPAIGN_CACHE", tempfile.gettempdir()))
        / "compass_campaign_programs"
    )
    fork.prepare_environment(cache)
    fork.warm()
    from .draw import Campaign

    folder = Path(asked.keep or tempfile.mkdtemp(prefix="campaign_")).absolute()
    if asked.repeat:
        seed, _, index = asked.repeat.partition(":")
        return Campaign(folder, int(seed), keep=True).repeat(int(index))
    return Campaign(folder, asked.seed, keep=bool(asked.keep), only=tuple(asked.only)).run(
        asked.n, asked.workers
    )


if __name__ == "__main__":
    sys.exit(main())
