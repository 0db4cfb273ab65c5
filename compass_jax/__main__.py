"""`python -m compass_jax` is `compass`."""

import os
import sys

if __name__ == "__main__":
    # `python -m` puts the current folder first on the import path, which `compass` does not
    if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
        del sys.path[0]
    from compass_jax.runs.signals import Ending

    with Ending("compass"):
        from compass_jax.commands.cli import main
    sys.exit(main())
