"""``python -m harness`` is ``kdtree``."""

import sys

from harness.cli import main

sys.exit(main())
