# SPDX-License-Identifier: BSD-3-Clause
"""Typical queries for the site's search box, and a page that each must find.

The page has every word of the query, and at least one of them in its title or headings, which the
search ranks first. Otherwise, only a few pages have all of the words.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from sphinx.search.en import SearchEnglish

#: The number of results that readers look at.
FIRST = 5

QUERIES = {
    "apex import error": "errors",
    "apex installed torch version": "install",
    "batchnorm different batch size": "sync_batch_norm",
    "broadcast buffers": "distributed_data_parallel",
    "clip gradients": "recipes",
    "cuda graph": "howto/cuda_graphs",
    "deterministic": "troubleshooting",
    "early stopping": "recipes",
    "find_unused_parameters": "howto/unused_parameters",
    "gradient accumulation": "howto/accumulation",
    "gradient clipping": "recipes",
    "hang": "troubleshooting",
    "hugging face trainer": "howto/libraries",
    "install": "install",
    "jupyter notebook": "quickstart",
    "learning rate large batch": "recipes",
    "libtorch ddp": "cpp",
    "loss nan": "troubleshooting",
    "loss scale overflow": "troubleshooting",
    "macos windows": "install",
    "memory usage": "troubleshooting",
    "mixed precision bf16": "howto/mixed_precision",
    "modulenotfounderror apex": "install",
    "multi node": "howto/several_nodes",
    "multiple gpus": "quickstart",
    "nccl timeout": "troubleshooting",
    "no_sync": "howto/accumulation",
    "out of memory": "troubleshooting",
    "pytorch lightning": "howto/libraries",
    "rank world size": "concepts",
    "reproducible": "troubleshooting",
    "resume checkpoint": "howto/checkpointing",
    "segmentation fault": "install",
    "slow": "troubleshooting",
    "slurm": "howto/several_nodes",
    "state_dict prefix": "howto/checkpointing",
    "sync batchnorm": "howto/batch_norm",
    "syncbn": "howto/batch_norm",
    "tensorboard": "recipes",
    "torch.compile": "howto/compile",
    "torchrun": "howto/several_nodes",
    "undefined symbol": "install",
    "uneven inputs join": "howto/uneven_inputs",
    "validation": "recipes",
    "warmup": "recipes",
}


def misses(index: Path) -> list[str]:
    """The queries that do not find their page, as sentences. ``index`` is searchindex.js."""
    text = index.read_text()
    found = json.loads(text[text.index("{") : text.rindex("}") + 1])
    english = SearchEnglish({})

    def pages(kind: str, word: str) -> set[str]:
        numbers = found[kind].get(english.stem(word), [])
        return {found["docnames"][n] for n in (numbers if isinstance(numbers, list) else [numbers])}

    sentences = []
    for query, page in QUERIES.items():
        words = list(filter(english.word_filter, re.findall(r"\w+", query.lower())))
        headed = set().union(*(pages("titleterms", word) for word in words))
        results = [pages("terms", word) | pages("titleterms", word) for word in words]
        if page not in set.intersection(*results):
            lacking = [
                word for word, having in zip(words, results, strict=True) if page not in having
            ]
            sentences.append(
                f"a search for {query!r} misses {page}, which lacks {', '.join(lacking)}"
            )
        elif page not in headed and len(set.intersection(*results)) > FIRST:
            sentences.append(f"a search for {query!r} finds {page} too late: not in a heading")
    return sentences
