"""The README's federated script runs as it stands, within its budget."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_readmes_federated_script_learns_within_its_budget(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (script,) = [block for block in blocks if "dpkernels.federated" in block]
    exec(compile(script, "README.md", "exec"), {})
    accuracy, epsilon = map(float, capsys.readouterr().out.split())
    assert accuracy > 0.8
    assert 1.9 < epsilon <= 2.0
