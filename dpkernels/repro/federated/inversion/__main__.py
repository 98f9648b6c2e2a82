"""``python -m dpkernels.repro.federated.inversion``."""

import sys

from dpkernels.repro.federated.inversion.command import main

sys.exit(main())
