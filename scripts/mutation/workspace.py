# SPDX-License-Identifier: BSD-3-Clause
"""A copy of the sources with all mutants, its C++ build, and an importable package apex."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from . import cpp, python
from .areas import CPP_TESTS
from .model import Mutant, source_files

RUNTIME = Path(__file__).resolve().parent / "runtime"

#: Appended to cpp/tests/CMakeLists.txt of the copy.
LISTENER = """
foreach(target IN ITEMS {targets})
  if(TARGET ${{target}})
    target_sources(${{target}} PRIVATE {listener})
  endif()
endforeach()
"""


class Workspace:
    """All files are in `folder`. Up-to-date files are reused."""

    def __init__(self, root: Path, folder: Path, interpreter: Path) -> None:
        self.root, self.folder, self.interpreter = root, folder, interpreter
        self.tree, self.build, self.overlay = folder / "tree", folder / "build", folder / "overlay"

    def find(self) -> list[Mutant]:
        found: list[Mutant] = []
        for path, area in source_files(self.root).items():
            finder = python if path.endswith(".py") else cpp
            for mutant in finder.find(self.root, path):
                mutant.area = area
                found.append(mutant)
        return found

    def write(self, mutants: list[Mutant]) -> set[str]:
        """Update the copy. Returns the paths in it that have changed."""
        wanted: dict[str, bytes] = {}
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "cpp", "cmake"]
            + ["python", "CMakeLists.txt", "pyproject.toml"],
            cwd=self.root, check=True, capture_output=True, text=True,
        )  # fmt: skip
        for path in listed.stdout.split("\n"):
            if (self.root / path).is_file() and not path.startswith("python/tests"):
                wanted[path] = (self.root / path).read_bytes()
        for path in {mutant.path for mutant in mutants}:
            own = [mutant for mutant in mutants if mutant.path == path]
            source = wanted[path].decode()
            if path.endswith(".py"):
                text = python.rewrite(source, own)
            else:
                name = str(self.tree / path)
                text = cpp.rewrite(source, own, name, RUNTIME / "apex_mutant.h")
            wanted[path] = text.encode()
        wanted["cpp/tests/CMakeLists.txt"] += LISTENER.format(
            targets=" ".join(CPP_TESTS), listener=RUNTIME / "listener.cpp"
        ).encode()
        changed: set[str] = set()
        for path, content in wanted.items():
            target = self.tree / path
            if not target.exists() or target.read_bytes() != content:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
                changed.add(path)
        for path in [path for path in self.tree.rglob("*") if path.is_file()]:
            relative = path.relative_to(self.tree).as_posix()
            if relative not in wanted:
                path.unlink()
                changed.add(relative)
        return changed

    def configure(self) -> None:
        if (self.build / "build.ninja").exists():
            return
        ask = "import torch; print(torch.utils.cmake_prefix_path)"
        prefix = subprocess.check_output([self.interpreter, "-c", ask], text=True).strip()
        launcher = shutil.which("ccache")
        environment = dict(os.environ)
        environment["PATH"] = f"{self.interpreter.parent}:{environment['PATH']}"
        subprocess.run(
            ["cmake", "-S", self.tree, "-B", self.build, "-G", "Ninja"]
            + ["-DAPEX_BUILD_TESTS=ON", "-DAPEX_BUILD_PYTHON=ON", "-DAPEX_BUILD_EXAMPLES=OFF"]
            + ["-DAPEX_UNITY_BUILD=ON", "-DAPEX_CUDA=OFF", f"-DCMAKE_PREFIX_PATH={prefix}"]
            + [f"-DPython_EXECUTABLE={self.interpreter}"]
            + ([f"-DCMAKE_CXX_COMPILER_LAUNCHER={launcher}"] if launcher else []),
            check=True, env=environment, stdout=subprocess.DEVNULL,
        )  # fmt: skip

    def compile(self, mutants: list[Mutant]) -> list[Mutant]:
        """Build. Returns the mutants that do not compile; empty if everything is built."""
        command = ["cmake", "--build", self.build, "--target", *CPP_TESTS, "_core", "--", "-k", "0"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        (self.folder / "build.log").write_text(done.stdout)
        if done.returncode == 0:
            self._make_package()
            return []
        for kind in ("error", "note|required from"):
            # A path is the one given by #line, or, in a header, one relative to the build folder.
            places = re.findall(rf"^(\S+?):(\d+):\d+:\s+(?:{kind})", done.stdout, re.MULTILINE)
            lines = {(Path(path).name, int(line)) for path, line in places}
            refused = [
                mutant
                for mutant in mutants
                for name, line in lines
                if Path(mutant.path).name == name and mutant.line <= line <= mutant.last_line
            ]
            if refused:
                return refused
        raise RuntimeError(f"the build failed, and not by a mutant: see {self.folder}/build.log")

    def _make_package(self) -> None:
        shutil.rmtree(self.overlay, ignore_errors=True)
        for package in ("apex", "amp_C", "apex_C"):
            shutil.copytree(self.tree / "python" / package, self.overlay / package)
        built = self.build / "python/src"
        for file in [*built.glob("_core*.so"), built / "_build_info.py"]:
            shutil.copy2(file, self.overlay / "apex")
