"""The README's command changes imports of Opacus into ours, and nothing else."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

import dpkernels.opacus
from python_tests.optional_packages import optional_package

README = Path(__file__).resolve().parents[2] / "README.md"

BEFORE = """\
import opacus
import opacus  # for epsilon
import opacus as op
import opacus.accountants
import opacus.utils.module_utils as module_utils
import opacus_like
import opacus, math
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus_like import opacus
def private():
    import opacus
    from opacus.validators import ModuleValidator
    return opacus.PrivacyEngine(), "from opacus import nothing", opacus.accountants.RDPAccountant
"""
AFTER = """\
import dpkernels.opacus as opacus
import dpkernels.opacus as opacus  # for epsilon
import dpkernels.opacus as op
import dpkernels.opacus.accountants, dpkernels.opacus as opacus
import dpkernels.opacus.utils.module_utils as module_utils
import opacus_like
import dpkernels.opacus as opacus, math
from dpkernels.opacus import PrivacyEngine
from dpkernels.opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus_like import opacus
def private():
    import dpkernels.opacus as opacus
    from dpkernels.opacus.validators import ModuleValidator
    return opacus.PrivacyEngine(), "from opacus import nothing", opacus.accountants.RDPAccountant
"""


def moved(folder, text):
    """Return ``text`` after the README's command, which is for GNU's sed."""
    (command,) = re.findall(r"^sed -i .*?\*\.py$", README.read_text(), re.MULTILINE | re.DOTALL)
    script = folder / "script.py"
    script.write_text(text)
    words = shlex.split(command.replace("\\\n", " "))
    assert words[-1] == "*.py"
    subprocess.run([*words[:-1], script.name], cwd=folder, check=True)
    return script.read_text()


@pytest.fixture
def gnu_sed():
    asked = ["sed", "--version"]
    if not shutil.which("sed") or b"GNU" not in subprocess.run(asked, capture_output=True).stdout:
        pytest.skip("the command is for GNU's sed")


@pytest.mark.usefixtures("gnu_sed")
def test_the_command_changes_every_form_of_import(tmp_path):
    assert moved(tmp_path, BEFORE) == AFTER
    assert moved(tmp_path, AFTER) == AFTER


@pytest.mark.usefixtures("gnu_sed")
def test_names_are_ours_after_the_command(tmp_path):
    text = moved(tmp_path, "\n".join(x for x in BEFORE.splitlines() if "opacus_like" not in x))
    names = {}
    exec(text, names)
    assert names["opacus"] is names["op"] is dpkernels.opacus
    engine, _, accountant = names["private"]()
    assert isinstance(engine, names["PrivacyEngine"])
    assert accountant is dpkernels.opacus.accountants.RDPAccountant


def test_the_version_is_that_of_opacus_and_says_whose_it_is():
    assert dpkernels.opacus.__version__ == "1.6.0+dpkernels"
    theirs = optional_package("opacus").__version__
    assert theirs.split(".")[:2] == ["1", "6"], "a new Opacus: compare its names with ours"
