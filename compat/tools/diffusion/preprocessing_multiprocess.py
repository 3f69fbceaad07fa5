"""``python -m tools.diffusion.preprocessing_multiprocess image …``, as documented."""

import sys

from latentry.cli import main

if __name__ == "__main__":
    sys.exit(main(prog="preprocessing_multiprocess", whole_clips=True))
