"""``dpkernels diagnose`` from its arguments to its files."""

from __future__ import annotations

import json

import pytest
import torch

from dpkernels import cli
from dpkernels.diagnose import measures, subject
from dpkernels.train.models import build
from dpkernels.train.options import filled_in
from python_tests.optional_packages import optional_package
from python_tests.train.files import write_adult, write_csv, write_imdb

optional_package("matplotlib")
pytestmark = pytest.mark.filterwarnings("ignore:.*with the fixed seed")

FIGURES = {
    "spectra": {"spectra"},
    "alignment": {"alignment", "alignment-a", "alignment-g"},
    "snr": {"snr"},
    "clipping": {"clipping"},
    "hessian": {"hessian"},
}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_adult(folder / "adult-a9a")
    return folder


@pytest.fixture
def adult(data_dir):
    """Return a command on a small data set in Adult's format."""

    def command(name, output, *arguments):
        common = ["--data-dir", str(data_dir), "--output", str(output)]
        return cli.main([name, *common, *arguments])

    return command


def numbers_in(folder):
    return json.loads((folder / measures.FILE).read_text())


def pictures_in(folder):
    return {file.stem for file in folder.glob("*.png")}


def test_digits_gets_all_of_them_and_they_are_called_not_private(tmp_path, capsys, monkeypatch):
    optional_package("sklearn")
    monkeypatch.setattr(measures, "_HESSIAN", {"steps": 4, "vectors": 1})  # 40 take 10 s
    assert cli.main(["diagnose", "--steps", "2", "--model", "mlp", "--output", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("NOT PRIVATE") and said.count("(not private)") == 8
    found = numbers_in(tmp_path)
    assert "must not be published" in found["not_private"]
    assert found["sources"]["oracle"]["not_private"] is not None
    assert found["sources"]["f^-3 noise"]["not_private"] is None
    assert pictures_in(tmp_path) == set().union(*FIGURES.values())

    layers = ["1", "3", "5"]
    assert list(found["spectra"]["f^-3 noise"]) == layers
    values = found["spectra"]["oracle"]["1"]["value"]
    assert values == sorted(values, reverse=True)
    assert list(found["alignment"]["f^-3 noise"]) == ["0", "1", "2"]
    assert 0 < found["alignment"]["white noise"]["2"]["1"]["cosine_f"] < 1
    colours = ["f^-3", "pink", "white"]
    methods = ["dp-kfc, oracle", *(f"dp-kfc, {x} noise" for x in colours), "dp-sgd"]
    assert list(found["snr"]["ratios"]) == list(found["clipping"]["methods"]) == methods
    assert list(found["snr"]["ratios"]["dp-sgd"]) == layers
    assert found["snr"]["noise_std"] == found["noise_multiplier"] / 256
    for spectrum in found["hessian"].values():
        assert len(spectrum["nodes"]) == 4 and spectrum["size"] == 64 * 128 + 128 + 129 * 138
        assert sum(spectrum["weights"]) == pytest.approx(1)


def test_only_what_is_asked_for_is_made(tmp_path, adult):
    asked = ["--dataset", "adult", "--batch-size", "64", "--steps", "1", "--what", "snr"]
    assert adult("diagnose", tmp_path, *asked) == 0
    assert pictures_in(tmp_path) == {"snr"}
    found = numbers_in(tmp_path)
    assert not {"spectra", "alignment", "clipping", "hessian"} & set(found)
    assert list(found["sources"]) == ["oracle", "synthetic"]


def test_a_finished_training_is_looked_at_as_it_is(tmp_path, adult, monkeypatch):
    run, output = tmp_path / "run", tmp_path / "diagnosis"
    trained = ["--dataset", "adult", "--epochs", "1", "--batch-size", "64", "--clip", "0.5"]
    assert adult("train", run, *trained, "--quiet", "--epsilon", "4") == 0
    seen = []
    monkeypatch.setattr(measures, "train_steps", lambda s, n, look: (seen.append(s), look(s.steps)))
    chosen = ["--checkpoint", str(run), "--what", "alignment", "clipping"]
    assert adult("diagnose", output, *chosen) == 0
    (looked_at,) = seen
    state = torch.load(run / "model.pt", weights_only=True)
    assert all(torch.equal(looked_at.model.state_dict()[name], state[name]) for name in state)
    report = json.loads((run / "report.json").read_text())
    found = numbers_in(output)
    assert found["noise_multiplier"] == report["privacy"]["noise_multiplier"]
    assert found["clipping"]["clip"] == 0.5
    assert list(found["alignment"]["synthetic"]) == [str(report["privacy"]["steps"])]


def test_texts_are_tokens_for_a_model_that_reads(tmp_path):
    write_imdb(tmp_path / "imdb")
    write_csv(tmp_path / "agnews" / "train.csv", ["text"], [["a story"], ["another story"]])
    given = {"dataset": "imdb", "model": "bert", "batch_size": 8, "data_dir": str(tmp_path)}
    made = subject.new_subject(filled_in(given))
    assert list(made.sources) == ["oracle", "synthetic", "public, AG News"]
    for probe in made.sources.values():
        inputs, _ = probe.batch(3, torch.Generator().manual_seed(0))
        assert made.model(*inputs).shape == (3, 2)


def test_ctrl_c_stops_without_a_trace(tmp_path, adult, monkeypatch, capsys):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(measures, "train_steps", interrupted)
    assert adult("diagnose", tmp_path, "--dataset", "adult", "--batch-size", "64") == 130
    assert capsys.readouterr().err == "\ndpkernels diagnose: stopped\n"


def test_steps_are_those_of_private_training(data_dir):
    given = {"dataset": "adult", "batch_size": 64, "data_dir": str(data_dir), "method": "disk"}
    made = subject.new_subject(filled_in(given | {"seed": 1}))
    before = [p.detach().clone() for p in made.model.parameters()]
    looked = []
    subject.train_steps(
        made, 12, lambda step: looked.append((step, next(made.model.parameters()).clone()))
    )
    assert [step for step, _ in looked] == list(range(13))
    assert torch.equal(looked[0][1], before[0]) and not torch.equal(looked[1][1], before[0])
    # DiSK's own parameters are elsewhere: what is left is what was looked at.
    assert torch.equal(looked[-1][1], next(made.model.parameters()))


def test_what_is_wrong_is_said(tmp_path, adult, capsys):
    assert adult("diagnose", tmp_path, "--checkpoint", str(tmp_path / "nothing")) == 2
    assert "nothing has no model.pt" in capsys.readouterr().err
    assert adult("diagnose", tmp_path, "--dataset", "adult", "--method", "sgd") == 2
    assert "method must be one with clip and noise, got sgd" in capsys.readouterr().err
    assert adult("diagnose", tmp_path, "--steps", "-1") == 2
    assert "steps must be an integer >= 0, got -1" in capsys.readouterr().err
    assert pictures_in(tmp_path) == set()


def test_figures_show_layers_from_the_first_to_the_last():
    names = [name for name, _ in build("vit", (1, 8, 8), 3).named_modules()]
    shown = measures._some(names)
    assert len(shown) == 5 and shown[0] == names[0] and shown[-1] == names[-1]
    assert measures._some(["a", "b"]) == ["a", "b"]
