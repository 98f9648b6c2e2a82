"""The version whose names these are."""

# Of Opacus, and after the plus whose code it is.
__version__ = "1.6.0+dpkernels"
