"""Benchmarks of the kernels against plain PyTorch: ``python -m benchmarks --help``.

``cases/`` holds one room for each room of ``dpkernels.ops``; a file there is found by being there.
``runner`` checks every candidate's output, then times all of them in turn; ``results`` is what it
returns, ``report`` shows it. The same cases run under pytest-benchmark: ``pytest benchmarks``.
"""
