# SPDX-License-Identifier: BSD-3-Clause
"""The C++ guide, docs/cpp.md, followed from an empty folder: one process, two, two nodes."""

import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from package_support import CMAKE, ROOT, cmake, generator, torchrun

pytestmark = [
    pytest.mark.skipif(CMAKE is None, reason="there is no cmake on PATH"),
    pytest.mark.nightly,
    pytest.mark.processes,
]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1"}


def blocks(title: str, language: str) -> list[str]:
    """The code blocks of a section of the guide."""
    section = (ROOT / "docs" / "cpp.md").read_text().partition(f"\n## {title}\n")[2]
    return re.findall(rf"```{language}\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)


@pytest.fixture(scope="module")
def programs(prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:  # noqa: F811
    """The guide's two programs, each built as the guide says."""
    titles = {"one": "One process", "many": "Two processes"}
    folders = {name: tmp_path_factory.mktemp(name) for name in titles}

    def build_program(name: str) -> Path:
        folder, title = folders[name], titles[name]
        (folder / "train.cpp").write_text(blocks(title, "cpp")[0])
        (folder / "CMakeLists.txt").write_text(blocks("Building it", "cmake")[0])
        build = str(folder / "build")
        options = ["-B", build, f"-Dapex_ROOT={prefix}", *generator()]
        status, output = cmake("-S", str(folder), *options)
        assert status == 0, output
        status, output = cmake("--build", build)
        assert status == 0, output
        return folder / "build" / "train"

    with ThreadPoolExecutor() as pool:
        return dict(zip(titles, pool.map(build_program, titles), strict=True))


def losses(output: str) -> list[float]:
    found = [float(loss) for loss in re.findall(r"^epoch \d: ([\d.e-]+)$", output, re.M)]
    assert len(found) == 10, output
    return found


def run(*command: str | Path, **environment: str) -> str:
    result = subprocess.run(
        [str(part) for part in command],
        env=ENVIRONMENT | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def expected(programs: dict[str, Path]) -> list[float]:
    """The losses of the one-process program."""
    alone = losses(run(programs["one"]))
    assert alone[-1] < alone[0]
    return alone


def test_guide_torchrun_two_ranks_print_the_losses_of_one_process(
    programs: dict[str, Path], expected: list[float]
) -> None:
    assert losses(run(*torchrun(2), programs["many"])) == pytest.approx(expected, rel=1e-4)
