# SPDX-License-Identifier: BSD-3-Clause
"""The reference has every public name, and its manual parts agree with the sources."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import apex

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
INCLUDE = ROOT / "cpp" / "include"
MODULES = (
    "apex",
    "apex.parallel",
    "apex.parallel.distributed",
    "apex.amp",
    "apex.fp16_utils",
    "apex.optimizers",
    "apex.normalization",
    "apex.normalization.fused_layer_norm",
    "apex.multi_tensor_apply",
    "amp_C",
    "apex_C",
)


def generator(name: str) -> ModuleType:
    """A module of docs/ that generates a part of the reference."""
    sys.path.insert(0, str(DOCS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(DOCS))


@pytest.mark.parametrize("module", MODULES)
def test_python_reference_has_every_public_name(module: str) -> None:
    page = (DOCS / "api.md").read_text()
    names = importlib.import_module(module).__all__
    assert names
    # In a directive, in a list of members, or in code within a sentence.
    missing = [name for name in names if not re.search(rf"(?<![A-Za-z]){name}(?!\w)", page)]
    assert missing == []


def test_python_reference_describes_every_name_in_its_directives() -> None:
    """Sphinx warns about unknown names, but silently omits names without a docstring."""
    page = (DOCS / "api.md").read_text()
    found = re.findall(r"auto(?:class|function|exception):: ([\w.]+)", page)
    assert len(found) > 20
    for name in found:
        module, _, attribute = name.rpartition(".")
        target = getattr(importlib.import_module(module), attribute)
        assert inspect.getdoc(target), name


def test_cpp_reference_has_every_name_of_the_headers() -> None:
    """The reference method is simpler: names after APEX_API, class, struct and using."""
    reference = generator("reference_cpp").reference()
    names = set()
    for header in set(INCLUDE.rglob("*.h")) - {INCLUDE / "apex" / "export.h"}:
        inner = r"namespace detail \{.*?\}  // namespace detail"
        text = re.sub(inner, "", header.read_text(), flags=re.S)
        text = re.sub(r"//.*$", "", text, flags=re.M)
        names |= set(re.findall(r"\bAPEX_API\s[^;{(]*?(\w+)\(", text))
        names |= set(
            re.findall(
                r"^(?:class|struct)(?: APEX_API)? (\w+)(?: final)?(?: :[^;{]*)? \{", text, re.M
            )
        )
        names |= set(re.findall(r"^TORCH_MODULE\((\w+)\)", text, re.M))
        names |= set(re.findall(r"^(?:enum class|using) (\w+)", text, re.M))
    assert len(names) > 50
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", reference)] == []
    headings = re.findall(r"^### `(\S+)`$", reference, re.M)
    for name in (
        "Reducer",
        "SyncBatchNorm",
        "DistributedDataParallel",
        "LARC",
        "verify_same_model",
    ):
        assert f"apex::parallel::{name}" in headings
    assert "apex::distributed::init_process_group" in headings
    assert "apex::InvalidArgument" in headings


def test_cpp_reference_keeps_bodies_and_private_members_out() -> None:
    reference = generator("reference_cpp").reference()
    assert "APEX_API" not in reference
    assert "core_" not in reference
    assert "detail::collect" not in reference
    assert "void prepare_for_forward();" in reference
    # A function body in the header ends the declaration.
    assert "auto forward(Args&&... args);" in reference


def test_headers_of_the_reference_are_all() -> None:
    included = (INCLUDE / "apex" / "parallel.h").read_text()
    for header in INCLUDE.rglob("*.h"):
        name = str(header.relative_to(INCLUDE))
        # Headers without names of their own: visibility, and the list itself.
        others = ("apex/export.h", "apex/parallel.h")
        assert name in others or f"<{name}>" in included, name


def test_options_of_python_are_those_of_the_signatures() -> None:
    options = generator("reference_options")
    for name, file, where in options.PYTHON_OPTIONS:
        module, _, attribute = name.rpartition(".")
        signature = inspect.signature(getattr(importlib.import_module(module), attribute))
        listed = options.python_options(file, where)
        assert [option for option, _, _ in listed] == list(signature.parameters), name
        for option, default, about in listed:
            assert about, f"{name}: the docstring does not say what {option} is"
            wanted = signature.parameters[option].default
            if isinstance(wanted, (int, float, str)):
                assert ast.literal_eval(default) == wanted if "*" not in default else True, option


def test_options_of_the_wrapper_are_explained_with_their_defaults() -> None:
    """The tables of the guide, which are written manually."""
    page = (DOCS / "distributed_data_parallel.md").read_text()
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| `([^`]*)` \|", page, re.M)
    table = {option: default for names, default in rows for option in re.findall(r"`(\w+)`", names)}
    parameters = inspect.signature(apex.parallel.DistributedDataParallel).parameters
    wanted = {name: str(p.default) for name, p in parameters.items() if name != "module"}
    assert {name: table.get(name) for name in wanted} == wanted


def test_options_of_cmake_are_all() -> None:
    table = generator("reference_options").cmake()
    declared = re.findall(
        r"(?:^option\(|^set\()(APEX_\w+)(?=[^\n]*\n?[^\n]*(?:CACHE|\"))",
        (ROOT / "CMakeLists.txt").read_text(),
        re.M,
    )
    for option in declared:
        assert f"`{option}`" in table, option
    assert len(declared) >= 8


def test_environment_variables_are_listed() -> None:
    page = (DOCS / "options.md").read_text()
    read = set()
    for source in (ROOT / "cpp" / "src").rglob("*.cpp"):
        read |= set(re.findall(r'(?:getenv|process_environment)\("(\w+)"\)', source.read_text()))
    assert {"APEX_HOST_CHANNEL", "USE_LIBUV"} <= read
    assert [name for name in read if f"`{name}`" not in page] == []


# --- messages ---


def test_errors_page_rows_are_parts_of_messages() -> None:
    messages = generator("reference_messages")
    found = messages.all_messages()
    rows = messages.rows((DOCS / "errors.md").read_text())
    assert len(rows) > 50
    for row in rows:
        for part in row.parts:
            hits = messages.matches(part, found)
            assert 1 <= len(hits) <= 2, f"{part!r}: {[message.text for message in hits]}"
            kinds = {message.kind.split()[0] for message in hits if message.kind}
            if len(row.parts) == 1 and kinds:
                assert re.split(r"\W", row.kind)[0] in kinds, f"{part!r} is {kinds}"


def test_errors_page_has_every_message_on_the_site() -> None:
    messages = generator("reference_messages")
    page = messages.fill((DOCS / "errors.md").read_text())
    assert messages.HEADER not in page
    assert "<!-- generated" not in page
    for message in messages.all_messages():
        assert f"| {messages._escaped(message.text)} |" in page or (
            f"<br>{messages._escaped(message.text)}" in page
            or f"{messages._escaped(message.text)}<br>" in page
        ), message.text


def test_errors_page_refuses_a_row_without_a_message() -> None:
    messages = generator("reference_messages")
    page = f"{messages.HEADER}\n|---|---|---|\n| nobody has ever raised this | ValueError | |\n"
    with pytest.raises(ValueError, match="nobody has ever raised this"):
        messages.fill(page)


def test_message_list_has_both_languages() -> None:
    messages = generator("reference_messages").all_messages()
    kinds = {message.kind for message in messages}
    assert {"ValueError", "RuntimeError", "ValueError (`InvalidArgument`)"} <= kinds
    assert len(messages) > 400
    texts = " ".join(message.text for message in messages)
    assert "there is no default process group" in texts
    assert "shared_param is not an option any more" in texts
    # Put together in functions that throw nothing themselves.
    assert "was ended by an exception on" in texts
    assert "'s buffers differ from rank" in texts
    assert "growth_factor is …; it must be above 1." in texts


# --- what a reader searches for ---

SEARCHES = {
    "howto/accumulation.md": ("no_sync", "accumulation", "larger batch", "memory"),
    "howto/unused_parameters.md": ("find_unused_parameters", "grad=None", "frozen", "freeze"),
    "howto/weighted.md": ("last batch", "different lengths", "weighted", "tokens"),
    "howto/uneven_inputs.md": ("join()", "fewer batches", "uneven"),
    "howto/checkpointing.md": ("resume", "map_location", "state_dict", "load"),
    "howto/elastic.md": ("--max-restarts", "torchrun", "fault tolerance", "restart"),
    "howto/several_nodes.md": ("SLURM", "sbatch", "multi-node", "NCCL_SOCKET_IFNAME", "srun"),
    "howto/mixed_precision.md": ("GradScaler", "autocast", "bfloat16", "float16", "amp"),
    "howto/batch_norm.md": ("SyncBatchNorm", "convert_syncbn_model", "running statistics"),
    "howto/compile.md": ("torch.compile", "graph breaks", "fullgraph"),
    "howto/cuda_graphs.md": ("CUDAGraph", "capture", "replay"),
    "howto/libraries.md": ("ApexOptimWrapper", "ApexScaler", "fusedlamb", "ignite", "Accelerate"),
    "troubleshooting.md": ("deadlock", "stuck", "OOM", "NaN", "diverges", "slow", "timeout"),
    "install.md": ("--cuda_ext", "setup.py", "--no-build-isolation", "nvcc", "wheel"),
    "concepts.md": ("DataParallel", "GIL", "local rank", "all-reduce", "CUDA_VISIBLE_DEVICES"),
    "quickstart.md": ("torchrun", "DistributedSampler", "find_package(apex"),
    "versioning.md": ("ABI", "deprecat", "SONAME"),
}


@pytest.mark.parametrize("page", SEARCHES)
def test_page_has_the_words_that_are_searched_for(page: str) -> None:
    text = (DOCS / page).read_text().lower()
    assert [word for word in SEARCHES[page] if word.lower() not in text] == []


@pytest.mark.parametrize(
    "name", [".readthedocs.yaml", ".github/workflows/docs.yml", ".github/workflows/tests.yml"]
)
def test_service_files_name_files_that_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    paths = re.findall(r"(?:docs|scripts)/[\w.-]+\.\w+|\.ci/run", text)
    assert paths
    assert [path for path in paths if not (ROOT / path).is_file()] == []
    if "sphinx" in text:
        assert "-W" in text or "fail_on_warning: true" in text


def test_search_misses_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/conf.py searches the built site, in test_static_analysis. Here the index is
    synthetic."""
    pytest.importorskip("sphinx")
    queries = generator("search_queries")
    monkeypatch.setattr(
        queries, "QUERIES", {"clipping": "recipes", "slow step": "faults", "hang": "faults"}
    )
    monkeypatch.setattr(queries, "FIRST", 0)
    terms = {"clip": [0, 1], "slow": 1, "step": [0, 1], "hang": 0}
    index = {"docnames": ["recipes", "faults"], "terms": terms, "titleterms": {"clip": 0}}
    (tmp_path / "searchindex.js").write_text(f"Search.setIndex({json.dumps(index)})")
    assert queries.misses(tmp_path / "searchindex.js") == [
        "a search for 'slow step' finds faults too late: not in a heading",
        "a search for 'hang' misses faults, which lacks hang",
    ]
