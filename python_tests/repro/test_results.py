"""What tables say of rows' own settings, and of repeated times."""

from __future__ import annotations

from dpkernels.repro.attempts import Attempt
from dpkernels.repro.dp_kfc import PLAIN
from dpkernels.repro.markdown import render
from dpkernels.repro.record import to_dict
from dpkernels.repro.results import Progress
from dpkernels.repro.tables import Block, Printed, Row, Table, cells
from dpkernels.repro.timing import Timing, timed_tasks
from dpkernels.repro.trials import Trial, read, task_of
from python_tests.repro.files import grid

ROWS = (
    Row("DP-SGD", "dp-sgd", {1.0: Printed(91.7)}),
    Row("DP-KFC", "dp-kfc", {1.0: Printed(94.2)}, settings={"lr": 0.01, "clip": 1.0}),
    Row("DiSK", "disk", {1.0: Printed(93.7)}),
)
TABLE = Table("1", "of this test", (Block("MNIST", ROWS, PLAIN["mnist"]),))
WHERE = {"time": "now"}


def trial(speed, seconds, others=0.0):
    origin = {"commit": "abc", "dirty": False}
    return Trial(90.0, 1.0, speed, "", (Attempt(seconds, 1, others, origin),))


def progress(**more):
    return Progress(TABLE, {}, "", {cell: {} for cell in cells(TABLE)}, **more)


def test_rows_with_own_settings_are_named_with_those_that_differ():
    text = render(progress(), WHERE)
    assert "- DP-KFC: lr 0.01" in text
    assert "DP-SGD has its own" not in text
    assert to_dict(progress(), WHERE)["own_settings"] == {"MNIST": {"DP-KFC": {"lr": 0.01}}}


def test_times_are_medians_and_ratios_are_of_medians():
    ours = Timing("DP-KFC", None, (trial(300, 5), trial(900, 4, 0.25), trial(400, 9)))
    hooks = Timing("Opacus' DP-SGD, hooks", "hooks", (trial(200, 10), trial(200, 10)))
    made = progress(timings={("MNIST", 1.0): [ours, hooks]})
    first, second = to_dict(made, WHERE)["timing"]
    assert (first["samples_per_second"], first["wall_seconds"], first["repeats"]) == (400, 5, 3)
    assert first["times_opacus"] == {"hooks": {"training": 2.0, "whole_run": 2.0}}
    assert first["others_cores"] == 0.25 and second["others_cores"] == 0
    row, _ = grid(render(made, WHERE), "method | wall-clock")
    assert row["training vs. hooks"] == row["whole run vs. hooks"] == "2.00x"
    assert row["others"] == "0.25"


def test_what_is_timed_is_a_sequence_repeated_in_folders_of_its_own(tmp_path):
    def timed(*methods):
        tasks = timed_tasks(TABLE, cells(TABLE), methods, 2, tmp_path, {})
        folders = [task.folder for task in tasks]
        assert len(set(folders)) == len(folders)
        assert {folder.relative_to(tmp_path).parts[0] for folder in folders} == {"timing"}
        return [(task.opacus or task.options.method, task.folder.name[-1]) for task in tasks]

    always = ["dp-sgd", "dp-kfc", "hooks", "ghost"]
    assert timed() == [(name, repeat) for repeat in "01" for name in always]
    assert ("disk", "1") in timed("disk")


def test_a_folder_that_another_version_wrote_is_passed_over(tmp_path):
    (cell,) = cells(TABLE, methods=["disk"])
    task = task_of(cell, 0, tmp_path, {})
    task.folder.mkdir(parents=True)
    (task.folder / "report.json").write_text("{}")
    assert read(task) is None
    (task.folder / "options.json").write_text('{"colour": "blue"}')
    assert read(task) is None
