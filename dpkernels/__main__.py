"""``python -m dpkernels``: the command line without the console script."""

import sys

from dpkernels.cli import main

sys.exit(main())
