"""``dpkernels diagnose``: what curvature, clipping and noise look like on a data set."""
