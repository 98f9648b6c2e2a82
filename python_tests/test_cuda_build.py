"""The record of the last CUDA build, and when it no longer is about these sources."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks import cuda_build, source_tree

CHANGES = {
    "a C++ source": ("csrc/module.cpp", b"// changed\n"),
    "a header": ("csrc/common/philox.h", b"// changed\n"),
    "a CUDA source": ("csrc/roots/cuda.cu", b"// changed\n"),
    "a new source": ("csrc/roots/new.cu", b"// new\n"),
    "the build": ("setup.py", b"# changed\n"),
    "a schema": ("dpkernels/ops/new.py", b'backend.register("new(Tensor x) -> Tensor", fake=f)\n'),
}


@pytest.fixture
def tree(tmp_path) -> Path:
    source_tree.copy(tmp_path / "tree")
    return tmp_path / "tree"


def test_a_copy_is_of_the_same_sources(tree):
    assert source_tree.digest(tree) == source_tree.digest()
    assert not list(tree.rglob("*.so"))
    for path in (tree / "csrc").rglob("*.h"):
        original = source_tree.ROOT / path.relative_to(tree)
        assert path.stat().st_mtime_ns == original.stat().st_mtime_ns, "ninja would compile it anew"


def test_a_copy_over_an_older_one_keeps_what_is_compiled_and_no_removed_source(tree):
    (tree / "build").mkdir()
    (tree / "build" / "object.o").touch()
    (tree / "csrc" / "removed.cpp").touch()
    source_tree.copy(tree)
    assert (tree / "build" / "object.o").is_file()
    assert source_tree.digest(tree) == source_tree.digest()


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_is_compiled_changes_the_hash(tree, change):
    name, text = CHANGES[change]
    with (tree / name).open("ab") as file:
        file.write(text)
    assert source_tree.digest(tree) != source_tree.digest()


@pytest.mark.parametrize("name", ["README.md", "dpkernels/ops/checks.py", "dpkernels/cli.py"])
def test_what_is_not_compiled_does_not(tree, name):
    with (tree / name).open("a") as file:
        file.write("\n")
    os.utime(tree / "setup.py")
    assert source_tree.digest(tree) == source_tree.digest()


def test_every_schema_is_hashed():
    from dpkernels import backend

    names = sorted(schema.partition("(")[0] for schema in source_tree.schemas())
    assert names == sorted(backend.operations())


def test_a_stale_record_says_so_and_how_to_renew_it(tree, tmp_path):
    result = tmp_path / "cuda_build.json"
    assert "never checked; run make cuda-build" in cuda_build.standing(result, tree)
    versions = {"torch": "2.15.0", "nvcc": "13.0.88"}
    result.write_text(json.dumps({"versions": versions, "built_from": source_tree.digest(tree)}))
    assert "checked on these sources with torch 2.15.0" in cuda_build.standing(result, tree)
    (tree / "csrc" / "module.cpp").unlink()
    assert "STALE" in cuda_build.standing(result, tree)
    assert "run make cuda-build" in cuda_build.standing(result, tree)


def test_the_committed_record_is_of_a_build_in_order():
    report = json.loads(cuda_build.RESULT.read_text())
    assert report["operators"]["CUDA"] >= 31
    assert "eigh" in report["operators"]["compiled"]
    assert report["versions"]["torch_cuda"] is not None
    assert report["built_from"] in cuda_build.summary(report)
