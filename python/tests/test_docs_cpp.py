# SPDX-License-Identifier: BSD-3-Clause
"""Every C++ block of the documentation and of header comments compiles.

A block is one of three kinds. A whole program has a ``main``. Declarations are at namespace scope,
and blocks of the same section may use them. Anything else is a fragment, the body of a function,
which may use the declarations in ``cpp/tests/docs/given.h``.
"""

from __future__ import annotations

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
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ here"),
]

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


def translation_unit(blocks: list[Block]) -> str:
    """All blocks, in namespaces by section, with their includes first."""
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
    return "\n".join([*dict.fromkeys(includes), '#include "given.h"', *body])


def compile_source(source: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        "g++", "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Wconversion",
        "-Wsign-conversion", "-Wshadow", "-Werror", "-Wno-unused", "-Wno-unused-parameter",
        "-Wno-main", "-Wno-return-type", *options,
        f"-I{INCLUDE}", f"-I{ROOT / 'cpp' / 'tests' / 'docs'}", f"-isystem{TORCH}",
        f"-isystem{TORCH / 'torch' / 'csrc' / 'api' / 'include'}", str(source),
    ]  # fmt: skip
    # The words that the tests search for are English.
    environment = {**os.environ, "LC_ALL": "C"}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


def test_docs_cpp_blocks_compile(tmp_path: Path) -> None:
    names = [block.file.name for block in all_blocks()]
    assert names.count("cpp.md") >= 16
    assert {"README.md", "sync_batch_norm.md", "amp.h", "optim.h"} <= set(names)
    source = tmp_path / "blocks.cpp"
    source.write_text(translation_unit(all_blocks()))
    done = compile_source(source)
    assert done.returncode == 0, done.stderr


def test_header_with_the_old_string_abi_says_so(tmp_path: Path) -> None:
    source = tmp_path / "abi.cpp"
    source.write_text("#include <apex/error.h>\n")
    done = compile_source(source, "-D_GLIBCXX_USE_CXX11_ABI=0")
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
    done = compile_source(source)
    assert done.returncode != 0
    errors = re.findall(r"static assertion failed: (.*)", done.stderr)
    for words in (
        "not a temporary NetImpl(), which nothing would own",
        "torch::nn::Module has no forward()",
        "has no public forward() that takes these arguments",
    ):
        assert any(words in error for error in errors), done.stderr
