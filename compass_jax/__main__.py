"""`python -m compass_jax` is `compass`."""

import sys

from compass_jax.runs.signals import Ending

if __name__ == "__main__":
    with Ending("compass"):
        from compass_jax.commands.cli import main
    sys.exit(main())
