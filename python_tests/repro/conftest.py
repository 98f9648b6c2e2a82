"""A small data set in MNIST's format, and the command on it."""

from __future__ import annotations

import pytest

from dpkernels import cli
from python_tests.repro.files import RECORDS, TESTED
from python_tests.train.files import write_mnist


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_mnist(folder / "mnist", RECORDS, TESTED)
    return folder


@pytest.fixture(scope="session")
def repro(data_dir):
    """Return the command, one epoch and two seeds, that writes to ``folder``."""

    def command(folder, *arguments, table=1):
        common = ["--table", str(table), "--seeds", "2", "--epochs", "1", "--batch-size", "64"]
        common += ["--data-dir", str(data_dir), "--runs", str(folder / "runs"), "--quiet"]
        return cli.main(
            ["repro", "dp-kfc", *common, "--output", str(folder / "out"), *map(str, arguments)]
        )

    return command
