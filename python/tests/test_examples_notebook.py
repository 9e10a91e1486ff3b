# SPDX-License-Identifier: BSD-3-Clause
"""The notebook runs from its first cell to its last, in a kernel of its own.

It compares two ranks with each other and with one process, and stops where they differ.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ddp_support import RankPool
from examples_support import EXAMPLES, environment

NOTEBOOK = EXAMPLES / "notebook" / "two_ranks.ipynb"


def run(notebook: Any, folder: Path) -> None:
    """Raises nbclient's CellExecutionError if a cell fails."""
    client = pytest.importorskip("nbclient").NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    own = {"IPYTHONDIR": str(folder / "ipython"), "MPLCONFIGDIR": str(folder / "matplotlib")}
    client.execute(env=environment(**own))


@pytest.fixture
def notebook() -> Any:
    for package in ("ipykernel", "matplotlib"):
        pytest.importorskip(package)
    return pytest.importorskip("nbformat").read(NOTEBOOK, as_version=4)


@pytest.mark.processes
def test_notebook_trains_two_ranks_and_draws_their_losses(notebook: Any, tmp_path: Path) -> None:
    run(notebook, tmp_path)
    outputs = {cell["id"]: cell["outputs"] for cell in notebook.cells if "outputs" in cell}
    texts = {
        name: "".join(output.get("text", "") for output in found) for name, found in outputs.items()
    }
    assert texts["compare"] == "the parameters of both ranks are bitwise equal\n"
    assert texts["alone"].startswith("the largest difference of a loss is")
    written = [output for found in outputs.values() for output in found]
    errors = "".join(output["text"] for output in written if output.get("name") == "stderr")
    errors = re.sub("Matplotlib is building the font cache.*\n", "", errors)  # on a busy machine
    assert not errors
    assert "image/png" in outputs["plot"][-1]["data"]
    first, last = (float(word.rstrip(",")) for word in texts["run"].split() if "0." in word)
    assert last < first / 10


def _trains_alone(rank: int, world: int, source: str, folder: str) -> None:
    names: dict[str, Any] = {}
    exec(source, names)
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        names["train"](rank, world, folder)


@pytest.mark.processes
@pytest.mark.parametrize("together", [True, False])
def test_module_of_the_notebook_leaves_ranks_equal_because_they_synchronize(
    together: bool, ranks: RankPool, tmp_path: Path
) -> None:
    """Without the other rank's gradients they differ: the notebook's comparison can fail."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    (source,) = ("".join(cell["source"][1:]) for cell in cells if cell["id"] == "module")
    backward = "loss.backward()"
    assert source.count(backward) == 1
    if not together:
        source = source.replace(backward, f"with model.no_sync(): {backward}")
    ranks.run(2, _trains_alone, source, str(tmp_path))
    one, other = (torch.load(tmp_path / f"rank_{rank}.pt")["state"] for rank in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one) is together


def test_notebook_is_committed_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) == 5
    for cell in code:
        assert cell["outputs"] == [] and cell["execution_count"] is None
