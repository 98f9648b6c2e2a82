"""Private training as a whole: the engine, a loader that samples, and an accountant."""

from dpkernels.run.loader import PrivateLoader

__all__ = ["PrivateLoader"]
