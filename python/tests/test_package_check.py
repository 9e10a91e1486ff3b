# SPDX-License-Identifier: BSD-3-Clause
"""Errors at import for an installation that cannot work: apex._check."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from package_support import cpp_program

import apex
from apex import _build_info, _check


def pretend(monkeypatch: pytest.MonkeyPatch, **facts: object) -> None:
    """Simulate a build against a torch with these properties."""
    built = {
        "torch_version": str(torch.__version__),
        "cxx11_abi": torch.compiled_with_cxx11_abi(),
        "with_cuda": torch.version.cuda is not None,
        "cuda_version": torch.version.cuda or "",
        "cuda_reason": "pretended",
    }
    fake = SimpleNamespace(**(built | facts))
    monkeypatch.setitem(sys.modules, "apex._build_info", fake)
    monkeypatch.setattr(apex, "_build_info", fake)


def test_installation_as_it_is_accepted() -> None:
    _check.installation()
    assert _build_info.torch_version == str(torch.__version__)
    assert _build_info.version == apex.__version__


BUILDS: list[tuple[dict[str, object], str]] = [
    (
        {"torch_version": "1.2.3+cpu"},
        rf"1\.2\.3\+cpu.*{re.escape(str(torch.__version__))}.*pip install --no-build-isolation",
    ),
    ({"cxx11_abi": not torch.compiled_with_cxx11_abi()}, "_GLIBCXX_USE_CXX11_ABI=.*pip install"),
    (
        {"with_cuda": True, "cuda_version": "9.9"},
        "CUDA parts of apex were built .* CUDA 9.9.*rebuild",
    ),
]


@pytest.mark.parametrize(("facts", "message"), BUILDS, ids=lambda value: str(value)[:20])
def test_installation_that_does_not_fit_names_both_and_the_remedy_in_one_line(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, object], message: str
) -> None:
    minor = ".".join(str(torch.__version__).split(".")[:2])
    pretend(monkeypatch, torch_version=f"{minor}.99+cpu")
    _check.installation()  # another patch release fits
    pretend(monkeypatch, **facts)
    with pytest.raises(ImportError, match=message) as error:
        _check.installation()
    assert "\n" not in str(error.value)


def test_installation_without_cuda_parts_warns_beside_a_torch_for_cuda(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    pretend(monkeypatch, with_cuda=False, cuda_version="", cuda_reason="APEX_CUDA is OFF")
    monkeypatch.setattr(torch.version, "cuda", None)
    _check.installation()
    assert not recwarn
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.warns(RuntimeWarning) as warned:
        _check.installation()
    assert len(warned) == 1
    message = str(warned[0].message)
    assert "without its CUDA parts (APEX_CUDA is OFF)" in message
    assert "install nvcc of CUDA 13.0 and rebuild apex with `pip install" in message


def test_installation_other_distribution_named_apex_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    info = tmp_path / "apex-0.9.10.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: apex\nVersion: 0.9.10\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="'apex' 0.9.10 .*pip uninstall apex"):
        _check.installation()


def test_installation_not_built_says_how_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(apex, "_build_info")
    monkeypatch.setitem(sys.modules, "apex._build_info", None)
    with pytest.raises(ImportError, match="has not been built.*pip install --no-build-isolation"):
        _check.installation()


def test_cpp_program_with_another_torch_at_run_time_says_so_first(tmp_path: Path) -> None:
    """Hazard: objects of another layout are silently overwritten. Only the version differs here."""
    program = cpp_program("cpp", "tests", "package", "apex_cpp_rank")
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("there is no C compiler here")
    source, library = tmp_path / "version.c", tmp_path / "version.so"
    source.write_text(
        "unsigned long aoti_torch_abi_version(void) { return 9ul << 56 | 8ul << 48; }"
    )
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    done = subprocess.run(
        [program, tmp_path / "parameters", "sgd"],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "apex was built for libtorch" in done.stderr and "but runs with 9.8" in done.stderr
