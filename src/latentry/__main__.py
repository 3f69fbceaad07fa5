"""``python -m latentry`` is the ``latentry`` command."""

import sys

from latentry.cli import main

sys.exit(main())
