"""`python -m compass_jax` is `compass`."""

import sys

from compass_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
