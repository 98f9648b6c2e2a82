"""Tests of dpkernels; the folders mirror the package's."""
