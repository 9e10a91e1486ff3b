# SPDX-License-Identifier: BSD-3-Clause
"""cmake/wheel_metadata.py: the torch that a package declares."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from package_support import ROOT, cmake, generator, make_torch, words

import apex


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, as scikit-build-core loads it: from the folder of the sources."""
    monkeypatch.chdir(ROOT)
    for name in ("Libtorch_ROOT", "PIP_BUILD_TRACKER"):
        monkeypatch.delenv(name, raising=False)
    path = ROOT / "cmake" / "wheel_metadata.py"
    spec = importlib.util.spec_from_file_location("wheel_metadata", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module


def fields(metadata: ModuleType, state: str) -> dict[str, object]:
    provider = metadata.Provider()
    provider.build_state(state)
    return provider.dynamic_metadata({}, {})


@pytest.mark.parametrize(
    ("version", "cuda", "name", "required"),
    [
        ("2.13.0+cpu", None, "torch2.13.cpu", "torch==2.13.*"),
        ("2.15.1+cu132", "13.2", "torch2.15.cu132", "torch==2.15.*"),
        ("2.14.0", "13.0", "torch2.14.cu130", "torch==2.14.*"),  # as on PyPI, without a label
        ("2.16.0+gitabc", None, "torch2.16.cpu", "torch==2.16.*"),
    ],
)
def test_wheel_belongs_to_the_torch_of_the_build(
    version: str,
    cuda: str | None,
    name: str,
    required: str,
    metadata: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("Libtorch_ROOT", str(make_torch(tmp_path / "torch", version, cuda)))
    for state in ("wheel", "editable", "metadata_wheel"):
        assert fields(metadata, state) == {
            "version": f"{apex.__version__}+{name}",
            "dependencies": [required],
        }


def test_source_distribution_fits_every_torch(metadata: ModuleType) -> None:
    assert fields(metadata, "sdist") == {
        "version": apex.__version__,
        "dependencies": ["torch>=2.11"],
    }
    # Declared in the metadata, or installers would treat the wheel's requirements as a mistake.
    assert metadata.Provider().dynamic_wheel({}) == {"dependencies": True}


def test_no_torch_ends_in_a_sentence(metadata: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="run `pip install torch`, then build with --no-build"):
        fields(metadata, "wheel")


def test_cmake_with_another_torch_than_the_wheel_names_refused(tmp_path: Path) -> None:
    other = make_torch(tmp_path / "torch", "2.99.0+cpu")
    status, output = cmake(
        "-S", str(ROOT), "-B", str(tmp_path / "build"), f"-DLibtorch_ROOT={other}",
        "-DSKBUILD_PROJECT_VERSION_FULL=0.1.0+torch2.13.cpu", *generator(),
    )  # fmt: skip
    assert status != 0
    assert "would require torch 2.13, which this Python has, but hold libraries for 2.99.0" in (
        words(output)
    )
