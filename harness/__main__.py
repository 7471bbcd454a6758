"""``python -m harness`` is ``kdtree``."""

import sys

try:
    from harness.cli import main
except KeyboardInterrupt:  # in the tenth of a second before the command can see to that itself
    print("kdtree: interrupted", file=sys.stderr)
    sys.exit(2)

sys.exit(main())
