"""`python -m compass_jax` is `compass`."""

import sys

from compass_jax.signals import Ending

if __name__ == "__main__":
    with Ending("compass"):
        from compass_jax.cli import main
    sys.exit(main())
