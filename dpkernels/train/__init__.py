"""``dpkernels train``: data sets, models, methods, and the loop that joins them."""
