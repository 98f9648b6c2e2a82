"""``make demo`` trains with both methods under one budget and shows what came of it."""

from __future__ import annotations

from benchmarks import demo
from python_tests.optional_packages import optional_package


def test_the_demo_ends_with_a_table_of_both_methods_and_a_picture(tmp_path, capsys):
    optional_package("sklearn")
    optional_package("matplotlib")
    assert demo.main(["--epochs", "1", "--quiet", "--output", str(tmp_path)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| dp-")]
    assert [row.split(" | ")[0] for row in rows] == ["| dp-sgd", "| dp-kfc"]
    epsilons = {float(row.split(" | ")[2]) for row in rows}
    assert len(epsilons) == 1 and max(epsilons) <= demo.SETTINGS["epsilon"]
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
