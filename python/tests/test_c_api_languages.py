# SPDX-License-Identifier: BSD-3-Clause
"""The examples in Rust and in Java on the C interface, built against the installed package.

The programs compare themselves with one process and stop where they differ; a changed program shows
that they do. Also one job of both languages.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from package_support import CMAKE, ROOT, cmake, generator, run_torchrun

EXAMPLES = ROOT / "cpp" / "examples"
RUST, JAVA = EXAMPLES / "rust_c_api", EXAMPLES / "java_c_api"
HEADER = ROOT / "cpp" / "include" / "apex" / "c_api.h"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
ENVIRONMENT.pop("LD_LIBRARY_PATH", None)
#: For each program, the weight of a rank's samples, and its value in the negative control.
WEIGHTS = {RUST: ("mine.len() as f64", "1.0"), JAVA: ("setWeight(last - first)", "setWeight(1)")}


def require_tool(name: str) -> str:
    """Skips the test where there is no such program, or one that does not run."""
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"there is no {name} here")
    done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=120)
    if done.returncode != 0:  # as rustup's, without a toolchain
        pytest.skip(f"{name} --version fails: {done.stderr.strip()}")
    return program


def changed(source: Path, folder: Path) -> Path:
    """A copy of an example whose ranks count alike, however many samples they have."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("target"))
    weight, wrong = WEIGHTS[source]
    found = 0
    for file in [*folder.glob("*.java"), *folder.glob("src/*.rs")]:
        text = file.read_text()
        found += text.count(weight)
        file.write_text(text.replace(weight, wrong))
    assert found == 1
    return folder


def build_rust(source: Path, target: Path, prefix: Path) -> list[str]:
    environment = {**ENVIRONMENT, "APEX_ROOT": str(prefix)}
    if not (prefix.parent / "torch").is_dir():
        environment["LIBTORCH"] = str(Path(torch.__file__).parent)
    command = [
        require_tool("cargo"), "build", "--release", "--offline", "--locked",
        f"--manifest-path={source / 'Cargo.toml'}", f"--target-dir={target}",
    ]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr
    return [str(target / "release" / "apex_rust")]


def build_java(source: Path, build: Path, prefix: Path) -> list[str]:
    for tool in ("javac", "java"):
        require_tool(tool)
    if CMAKE is None:
        pytest.skip("there is no cmake on PATH")
    options = ["-B", str(build), f"-Dapex_ROOT={prefix}", *generator()]
    status, output = cmake("-S", str(source), *options)
    if status != 0 and re.search("There is no jni.h|Could NOT find Java", output):
        pytest.skip(f"there is no whole JDK here: {output}")
    assert status == 0, output
    status, output = cmake("--build", str(build))
    assert status == 0, output
    assert "warning" not in output, output
    # The one beside the compiler, where there are several.
    cache = (build / "CMakeCache.txt").read_text()
    java = re.search(r"^Java_JAVA_EXECUTABLE:\w+=(.*)$", cache, re.M)
    assert java is not None
    return [java[1], f"-Djava.library.path={build}", "-jar", str(build / "train.jar")]


BUILDERS = {RUST: build_rust, JAVA: build_java}
PROGRAMS = [pytest.param(RUST, id="rust"), pytest.param(JAVA, id="java")]


@pytest.fixture(scope="module")
def commands(prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, list[str]]:
    """What starts a rank of each program that was built; filled by `command_of`."""
    return {}


def command_of(
    source: Path, commands: dict[Path, list[str]], prefix: Path, factory: pytest.TempPathFactory
) -> list[str]:
    if source not in commands:
        commands[source] = BUILDERS[source](source, factory.mktemp(source.name), prefix)
    return commands[source]


def run(ranks: int, command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return run_torchrun(ranks, *command, cwd=cwd, env=ENVIRONMENT, timeout_s=300)


def losses(done: subprocess.CompletedProcess[str], ranks: int) -> list[float]:
    assert done.returncode == 0, done.stdout + done.stderr
    words = f"ranks: {ranks}; parameters bitwise equal, gradients those of one process\n"
    assert done.stdout.endswith(words), done.stdout
    found = [float(loss) for loss in re.findall(r"^epoch \d+: loss (\S+)$", done.stdout, re.M)]
    assert len(found) == 4 and found == sorted(found, reverse=True)
    return found


@pytest.mark.processes
@pytest.mark.parametrize("source", PROGRAMS)
def test_two_ranks_train_as_one_process_does(
    source: Path,
    commands: dict[Path, list[str]],
    prefix: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    command = command_of(source, commands, prefix, tmp_path_factory)
    together = losses(run(2, command, tmp_path), 2)
    assert together == pytest.approx(losses(run(1, command, tmp_path), 1), abs=2e-6)
    alone = {k: v for k, v in ENVIRONMENT.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(command, env=alone, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "apex_init(): RANK and WORLD_SIZE are not set" in done.stderr, done.stderr


@pytest.mark.processes
@pytest.mark.parametrize("source", PROGRAMS)
def test_negative_control_ranks_that_count_alike_are_found(
    source: Path, prefix: Path, tmp_path: Path
) -> None:
    wrong = changed(source, tmp_path / "changed")
    done = run(2, BUILDERS[source](wrong, tmp_path / "build", prefix), tmp_path)
    assert done.returncode != 0
    assert "epoch 1: gradients differ from those of one process" in done.stderr, done.stderr


@pytest.mark.processes
def test_job_of_a_rank_in_rust_and_one_in_java(
    commands: dict[Path, list[str]],
    prefix: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    rust, java = (command_of(s, commands, prefix, tmp_path_factory) for s in (RUST, JAVA))
    script = tmp_path / "rank.sh"
    script.write_text(
        f'if [ "$RANK" = 0 ]; then exec {" ".join(rust)}; else exec {" ".join(java)}; fi\n'
    )
    losses(run(2, ["sh", str(script)], tmp_path), 2)


def test_rust_declares_every_function_and_number_of_the_header() -> None:
    header = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.S)
    declared = (RUST / "src" / "ffi.rs").read_text()
    c = dict(re.findall(r"^APEX_API [^;]*?(\w+)\(([^;]*)\);", header, re.M))
    rust = dict(re.findall(r"\bfn (\w+)\(([^;]*?),?\s*\)", declared))
    assert len(c) > 15 and rust.keys() == c.keys()
    for name, parameters in c.items():
        ours = [] if parameters == "void" else parameters.split(",")
        names = [re.findall(r"\w+", parameter)[-1] for parameter in ours]
        assert re.findall(r"(\w+):", rust[name]) == names, name
    for number, value in re.findall(r"const (APEX_\w+): c_int = (\d+)", declared):
        assert re.search(rf"\b{number} = {value}\b", header), number
