# SPDX-License-Identifier: BSD-3-Clause
"""Every C++ block of the documentation and of header comments compiles.

A block is one of three kinds. A whole program has a ``main``. Declarations are at namespace scope,
and blocks of the same section may use them. Anything else is a fragment, the body of a function,
which may use the declarations in ``cpp/tests/docs/given.h``.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from package_support import ROOT

INCLUDE = ROOT / "cpp" / "include"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
HEADERS = sorted(INCLUDE.rglob("*.h"))
TORCH = Path(torch.__file__).parent / "include"
pytestmark = pytest.mark.nightly

DECLARATIONS = re.compile(r"\A(#include.*\n|\s)*(struct |class |namespace |template )")


class Block(NamedTuple):
    file: Path
    line: int
    section: int
    code: str


def blocks_of_page(page: Path, language: str = "cpp") -> list[Block]:
    text = page.read_text()
    found = []
    for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.M | re.S):
        before = text[: match.start()]
        section = len(re.findall(r"^#+ ", before, re.M))
        found.append(Block(page, before.count("\n") + 2, section, match[1]))
    return found


def blocks_of_header(header: Path) -> list[Block]:
    """Code is indented by five spaces or more, and begins a comment or follows an empty line."""
    found: list[Block] = []
    code: list[str] = []
    begins = True
    for number, line in enumerate([*header.read_text().splitlines(), ""], 1):
        match = re.match(r"\s*///( {5,}\S.*)$", line)
        if match and (code or begins):
            code.append(match[1])
        elif code and re.match(r"\s*///\s*$", line):
            code.append("")
        elif code:
            text = textwrap.dedent("\n".join(code)).rstrip() + "\n"
            found.append(Block(header, number - len(code), len(found), text))
            code = []
        begins = not match and (re.match(r"\s*///\s*$", line) or not line.strip().startswith("///"))
    return found


def all_blocks() -> list[Block]:
    return [
        *(block for page in PAGES for block in blocks_of_page(page)),
        *(block for header in HEADERS for block in blocks_of_header(header)),
    ]


#: Code that only passes a wrapper and its parts around needs none of our headers. If the same names
#: are defined with other kinds or parameters, this is an error.
FORWARD = """
namespace apex::amp { class LossScaler; }
namespace apex::parallel {
template <typename> class DistributedDataParallel;
class LARC;
class Reducer;
}
namespace forward {
struct Net;
void train(apex::parallel::DistributedDataParallel<Net>&, apex::parallel::LARC&,
           apex::parallel::Reducer&, apex::amp::LossScaler&);
}
"""


def translation_unit(blocks: list[Block]) -> str:
    """FORWARD, then all blocks, in namespaces by section, with their includes first."""
    includes: list[str] = []
    body: list[str] = []
    for number, block in enumerate(blocks):
        includes += re.findall(r"^#include.*?>", block.code, re.M)
        code = re.sub(r"^#include", "// #include", block.code, flags=re.M)
        line = f'#line {block.line} "{block.file.relative_to(ROOT)}"\n'
        name = re.sub(r"\W", "_", f"{block.file.relative_to(ROOT)}_{block.section}")
        if "int main(" in code:
            inner = f"namespace program_{number} {{\n{line}{code}}}\n"
        elif DECLARATIONS.match(block.code):
            inner = line + code
        else:
            inner = f"[[maybe_unused]] void block_{number}() {{\n{line}{code}}}\n"
        body.append(f"namespace {name} {{\nusing namespace given;\n{inner}}}\n")
    return "\n".join([FORWARD, *dict.fromkeys(includes), '#include "given.h"', *body])


#: The name of a standard in compilers that are older than its release.
DRAFTS = {"c++20": "c++2a", "c++23": "c++2b"}


@functools.cache
def find_compiler(name: str) -> str | None:
    names = [name, *(f"{name}-{version}" for version in range(22, 10, -1))]
    return next(filter(None, map(shutil.which, names)), None)


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    # The words that the test searches for are English.
    environment = {**os.environ, "LC_ALL": "C"}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


def called(compiler: str) -> str:
    return f"{compiler} ({run([compiler, '--version']).stdout.partition(chr(10))[0]})"


@functools.cache
def standard_option(compiler: str, standard: str) -> str | None:
    """How this compiler spells the standard; None if it does not support it."""
    for name in filter(None, (standard, DRAFTS.get(standard))):
        if run([compiler, f"-std={name}", "-fsyntax-only", "-xc++", os.devnull]).returncode == 0:
            return f"-std={name}"
    return None


def compile_source(
    name: str, source: Path, *options: str, standard: str = "c++20"
) -> subprocess.CompletedProcess[str]:
    """Skips the test without such a compiler, or if it does not support that standard."""
    compiler = find_compiler(name)
    if compiler is None:
        pytest.skip(f"there is no {name} here")
    spelled = standard_option(compiler, standard)
    if spelled is None:
        pytest.skip(f"{called(compiler)} has no option for {standard}")
    command = [
        compiler, spelled, "-fsyntax-only", "-Wall", "-Wextra", "-Wconversion",
        "-Wsign-conversion", "-Wshadow", "-Werror", "-Wno-unused", "-Wno-unused-parameter",
        "-Wno-main", "-Wno-return-type", *options,
        f"-I{INCLUDE}", f"-I{ROOT / 'cpp' / 'tests' / 'docs'}", f"-isystem{TORCH}",
        f"-isystem{TORCH / 'torch' / 'csrc' / 'api' / 'include'}", str(source),
    ]  # fmt: skip
    return run(command)


def require_torch(name: str, folder: Path, standard: str = "c++20") -> None:
    """After an unexpected result, skip if the compiler cannot compile torch alone."""
    source = folder / "torch_alone.cpp"
    source.write_text("#include <torch/torch.h>\n")
    done = compile_source(name, source, standard=standard)
    if done.returncode != 0:
        error = next((line for line in done.stderr.splitlines() if "error" in line), "")
        compiler = called(find_compiler(name) or name)
        pytest.skip(f"{compiler} does not compile torch's headers as {standard}: {error}")


@pytest.mark.parametrize(("compiler", "standard"), [("g++", "c++23"), ("clang++", "c++20")])
def test_docs_cpp_blocks_compile(compiler: str, standard: str, tmp_path: Path) -> None:
    source = tmp_path / "blocks.cpp"
    source.write_text(translation_unit(all_blocks()))
    done = compile_source(compiler, source, standard=standard)
    if done.returncode != 0:
        require_torch(compiler, tmp_path, standard)
    assert done.returncode == 0, done.stderr


def fake_compiler(folder: Path, *standards: str) -> Path:
    """A compiler that supports these standards, but cannot compile a header."""
    folder.mkdir()
    path = folder / "clang++"
    path.write_text(f"""#!/bin/sh
case "$*" in --version) echo "some clang version 14.0.6"; exit ;; esac
for known in {" ".join(standards)}; do
  case "$*" in "-std=$known -fsyntax-only -xc++ /dev/null") exit ;; esac
done
echo "error: a wild header" >&2
exit 1
""")
    path.chmod(0o755)
    return path


def test_compiler_of_another_age_is_asked_what_it_can_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One test suite runs with every compiler. A standard may have its draft's name."""
    draft = fake_compiler(tmp_path / "draft", "c++20", "c++2b")
    assert standard_option(str(draft), "c++20") == "-std=c++20"
    assert standard_option(str(draft), "c++23") == "-std=c++2b"
    old = fake_compiler(tmp_path / "old", "c++17", "c++2a")
    assert standard_option(str(old), "c++20") == "-std=c++2a"
    for compiler, reason in (
        (old, "has no option for c++23"),
        (draft, "does not compile torch's headers as c++23: error: a wild header"),
        (None, "there is no clang++ here"),
    ):
        monkeypatch.setitem(globals(), "find_compiler", lambda name, found=compiler: found)
        with pytest.raises(pytest.skip.Exception) as skipped:
            test_docs_cpp_blocks_compile("clang++", "c++23", tmp_path)
        assert reason in str(skipped.value)
        assert compiler is None or "clang version 14.0.6" in str(skipped.value)


def test_header_with_the_old_string_abi_says_so(tmp_path: Path) -> None:
    source = tmp_path / "abi.cpp"
    source.write_text("#include <apex/error.h>\n")
    done = compile_source("g++", source, "-D_GLIBCXX_USE_CXX11_ABI=0")
    assert done.returncode != 0
    assert "built with the C++11 ABI of libstdc++" in done.stderr


def test_wrapper_what_it_cannot_wrap_or_call_is_said_by_the_compiler(tmp_path: Path) -> None:
    source = tmp_path / "refused.cpp"
    source.write_text("""
        #include <apex/parallel/distributed_data_parallel.h>
        using apex::parallel::DistributedDataParallel;
        struct NetImpl : torch::nn::Module { torch::Tensor forward(torch::Tensor x) { return x; } };
        TORCH_MODULE(Net);
        void temporary() { DistributedDataParallel model{NetImpl()}; }
        void base() { DistributedDataParallel model(std::make_shared<torch::nn::Module>()); }
        void number() { DistributedDataParallel model(7); }
        void arguments(DistributedDataParallel<Net>& model, torch::Tensor x) {
          model.forward(x, std::string("more"));
        }
    """)
    done = compile_source("g++", source)
    assert done.returncode != 0
    errors = re.findall(r"static assertion failed: (.*)", done.stderr)
    if not errors:
        require_torch("g++", tmp_path)
    for words in (
        "not a temporary NetImpl(), which nothing would own",
        "torch::nn::Module has no forward()",
        "has no public forward() that takes these arguments",
    ):
        assert any(words in error for error in errors), done.stderr


def test_docs_cpp_blocks_are_found() -> None:
    names = [block.file.name for block in all_blocks()]
    assert names.count("cpp.md") >= 16
    assert {"README.md", "sync_batch_norm.md", "amp.h", "optim.h"} <= set(names)
