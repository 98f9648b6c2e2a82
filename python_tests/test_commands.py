"""What commands do where a shell, a disk or a folder lets them down."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dpkernels
from dpkernels.cli import main
from dpkernels.run.checkpoint import read, write_atomically
from dpkernels.whole_file import check_folder, whole_file, write_text
from python_tests.optional_packages import optional_package

CALIBRATE = ["calibrate", "--epsilon", "1", "--delta", "1e-5", "--steps", "10", "--rate", "0.1"]
COMMAND = [sys.executable, "-c", "import sys; from dpkernels.cli import main; sys.exit(main())"]


def environment(buffered: bool = True) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    root = str(Path(dpkernels.__file__).parent.parent)
    return own | {"PYTHONPATH": root} | ({} if buffered else {"PYTHONUNBUFFERED": "1"})


def limited(arguments, cwd, largest: int) -> subprocess.CompletedProcess[str]:
    """Run a command that can write no file beyond ``largest`` bytes, as on a full disk."""
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest)),
    )


@pytest.mark.parametrize(
    ("arguments", "buffered"),
    [
        ("info", True),
        ("info", False),
        ("train --list", True),
        ("train --help", True),
        ("federate --list", True),
    ],
)
def test_a_reader_that_leaves_ends_a_command_in_silence(arguments, buffered):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*COMMAND, *arguments.split()],
        stdout=writer,
        stderr=subprocess.PIPE,
        env=environment(buffered),
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("buffered", [True, False])
def test_output_that_cannot_be_written_is_said_in_one_line(buffered):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "info"],
            stdout=full,
            stderr=subprocess.PIPE,
            env=environment(buffered),
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "output cannot be written" in done.stderr


def test_a_plot_has_its_folder_made(tmp_path, capsys):
    optional_package("matplotlib")
    file = tmp_path / "not" / "there" / "curve.svg"
    assert main([*CALIBRATE, "--plot", str(file)]) == 0
    assert file.read_text().startswith("<?xml") and [*file.parent.iterdir()] == [file]
    assert "epsilon" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("curve.xyz", "ends in .png, .pdf, .svg"),
        ("curve", "ends in .png, .pdf, .svg"),
        ("folder.png", "got the folder"),
        ("file/curve.png", "file"),
    ],
)
def test_a_plot_that_cannot_be_is_refused_before_anything_is_computed(
    name, reason, tmp_path, capsys, monkeypatch
):
    optional_package("matplotlib")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr("dpkernels.privacy.calibrate_command._row", None)
    assert main([*CALIBRATE, "--plot", str(tmp_path / name)]) == 2
    assert reason in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_plot_on_a_full_disk_leaves_the_old_one(tmp_path):
    optional_package("matplotlib")
    (tmp_path / "curve.png").write_text("old")
    done = limited([*CALIBRATE, "--plot", "curve.png"], tmp_path, 2_000)
    assert done.returncode == 2
    assert done.stderr == "dpkernels calibrate: [Errno 27] File too large: 'curve.png'\n"
    assert [file.name for file in tmp_path.iterdir()] == ["curve.png"]
    assert (tmp_path / "curve.png").read_text() == "old"


def test_training_on_a_full_disk_leaves_the_old_checkpoint(tmp_path):
    optional_package("sklearn")
    train = ["train", "--quiet", "--output", "run", "--seed", "1", "--epochs", "2"]
    whole = limited(train, tmp_path, 10_000_000)
    assert whole.returncode == 0
    # As a run that was stopped: not at its end, with a checkpoint.
    for name in ("model.pt", "report.json", "report.txt"):
        (tmp_path / "run" / name).unlink()
    before = {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()}
    done = limited(["train", "--quiet", "--resume", "--output", "run"], tmp_path, 1_000)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "File too large: 'run/model.pt'" in done.stderr
    assert "go on with: dpkernels train --resume --output run" in done.stderr
    assert {f.name: f.read_bytes() for f in (tmp_path / "run").iterdir()} == before
    again = limited(["train", "--quiet", "--resume", "--output", "run"], tmp_path, 10_000_000)
    assert again.returncode == 0 and (tmp_path / "run" / "report.json").exists()


def test_training_that_finds_the_disk_full_leaves_no_folder(tmp_path):
    optional_package("sklearn")
    done = limited(["train", "--quiet", "--output", "runs/run"], tmp_path, 1_000)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "File too large: 'runs/run/checkpoint.pt'" in done.stderr
    assert "make room, then begin again" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [10, 1_000_000])
def test_a_checkpoint_that_does_not_fit_leaves_the_old_one(tmp_path, size):
    path = tmp_path / "run.pt"
    write_atomically(path, {"old": 1})
    code = (
        "import resource, torch; from dpkernels.run.checkpoint import write_atomically\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))\n"
        f"write_atomically({str(path)!r}, {{'new': torch.zeros({size})}})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"OSError: [Errno 27] File too large: {str(path)!r}"
    assert list(tmp_path.iterdir()) == [path] and read(path) == {"old": 1}


def test_a_file_is_the_old_or_the_new_whole(tmp_path):
    path, link = tmp_path / "file", tmp_path / "link"
    write_text(path, "old")
    link.symlink_to(path)

    def fail():
        with whole_file(path) as partial:
            partial.write_text("half")
            assert path.read_text() == "old"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_text() == "old"
    write_text(link, "new")
    assert path.read_text() == "new" and link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [path, link]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_what_is_not_a_file_is_not_replaced(tmp_path):
    link = tmp_path / "full"
    link.symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device.*full"):
        write_text(link, "text")
    write_text(Path("/dev/null"), "text")
    assert Path("/dev/null").is_char_device() and Path("/dev/full").is_char_device()


def test_a_file_in_place_of_a_folder_is_named(tmp_path, capsys):
    (tmp_path / "file").touch()
    inside = tmp_path / "file" / "run"
    for command in (
        ["train", "--output", str(inside)],
        ["federate", "--output", str(inside)],
        ["diagnose", "--output", str(inside)],
        ["repro", "dp-kfc", "--table", "1", "--output", str(inside)],
        ["repro", "dp-kfc", "--table", "1", "--runs", str(inside)],
    ):
        assert main(command) == 2
        assert f"{tmp_path / 'file'} is a file; name a folder" in capsys.readouterr().err
    check_folder(tmp_path / "a" / "b", "output")


@pytest.mark.parametrize("junk", [b"", b"junk", b"\x80\x04j", b"PK\x03\x04", bytes(range(256))])
def test_what_is_no_checkpoint_is_named(tmp_path, junk):
    (tmp_path / "run.pt").write_bytes(junk)
    with pytest.raises(ValueError, match=r"run\.pt cannot be read as a checkpoint"):
        read(tmp_path / "run.pt")
    with pytest.raises(FileNotFoundError, match="absent"):
        read(tmp_path / "absent.pt")


def test_ctrl_c_is_no_traceback(monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("dpkernels.privacy.calibrate_command.run", interrupted)
    assert main(CALIBRATE) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "\ndpkernels: stopped\n"


def test_a_checkpoint_keeps_what_it_was_given(tmp_path):
    write_atomically(tmp_path / "run.pt", {"x": torch.arange(3)})
    assert torch.equal(read(tmp_path / "run.pt")["x"], torch.arange(3))
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]
