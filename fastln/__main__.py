"""``python -m fastln``: see :mod:`fastln.report`."""

import sys

from fastln.report import main

sys.exit(main())
