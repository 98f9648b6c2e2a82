"""Which public models train privately as they are: Hugging Face's and PEFT's, from configurations.

``python -m benchmarks.models`` writes the table, ``benchmarks/results/models.md``.
"""
