# SPDX-License-Identifier: BSD-3-Clause
"""What readers type into the site's search box, and a page that has to be among the results.

The page has every word of the query, and one of them at least in its title or headings, which the
search puts first.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from sphinx.search.en import SearchEnglish

QUERIES = {
    "apex import error": "troubleshooting",
    "apex installed torch version": "install",
    "batchnorm different batch size": "sync_batch_norm",
    "broadcast buffers": "distributed_data_parallel",
    "clip gradients": "recipes",
    "cuda graph": "howto/cuda_graphs",
    "early stopping": "recipes",
    "find_unused_parameters": "howto/unused_parameters",
    "gradient accumulation": "howto/accumulation",
    "gradient clipping": "recipes",
    "hang": "troubleshooting",
    "install": "install",
    "learning rate large batch": "recipes",
    "libtorch ddp": "cpp",
    "loss nan": "troubleshooting",
    "loss scale overflow": "amp",
    "mixed precision bf16": "howto/mixed_precision",
    "multi node": "howto/several_nodes",
    "nccl timeout": "troubleshooting",
    "no module named apex": "install",
    "no_sync": "howto/accumulation",
    "out of memory": "troubleshooting",
    "pytorch lightning": "howto/lightning",
    "rank world size": "concepts",
    "resume checkpoint": "howto/checkpointing",
    "slow": "troubleshooting",
    "slurm": "howto/several_nodes",
    "syncbn": "sync_batch_norm",
    "torch.compile": "howto/compile",
    "torchrun": "quickstart",
    "undefined symbol": "install",
    "uneven inputs join": "howto/uneven_inputs",
}


def misses(index: Path) -> list[str]:
    """The queries that do not find their page, as sentences; ``index`` is searchindex.js."""
    text = index.read_text()
    found = json.loads(text[text.index("{") : text.rindex("}") + 1])
    stem = SearchEnglish({}).stem

    def pages(kind: str, word: str) -> set[str]:
        numbers = found[kind].get(stem(word), [])
        return {found["docnames"][n] for n in (numbers if isinstance(numbers, list) else [numbers])}

    sentences = []
    for query, page in QUERIES.items():
        words = re.findall(r"\w+", query.lower())
        headed = [word for word in words if page in pages("titleterms", word)]
        lacking = [word for word in words if page not in pages("terms", word) and word not in headed]
        if lacking or not headed:
            what = f"lacks {', '.join(lacking)}" if lacking else "has none of it in a heading"
            sentences.append(f"a search for {query!r} misses {page}, which {what}")
    return sentences
