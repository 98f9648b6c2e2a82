"""``dpkernels repro``: the tables of the papers, run again."""
