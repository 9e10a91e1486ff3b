# SPDX-License-Identifier: BSD-3-Clause
"""A synchronized batch norm layer, compared with torch's on the whole batch.

    python syncbn_layer.py
    python -m apex.parallel.multiproc --nproc 2 syncbn_layer.py

Every rank normalizes its own batch [3, 5, 20] with the statistics of all ranks' batches. The
outputs, gathered on every rank, equal those of torch.nn.BatchNorm1d on the whole batch in one
process.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import apex

sys.path.append(str(Path(__file__).resolve().parents[1]))
import example_support as support


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", default=20, type=int, help="batches to normalize; default: 20")
    support.add_local_rank(parser)
    args = parser.parse_args()

    support.launch_alone_unless_launched()
    device = support.choose_device(args.local_rank)
    use_cuda = device.type == "cuda"
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)

    sbn = apex.parallel.SyncBatchNorm(5)
    if use_cuda:
        sbn = sbn.cuda()
    reference = torch.nn.BatchNorm1d(5).to(device)

    difference = 0.0
    for _ in support.progress(range(args.steps), "batches", rank):
        input_t = torch.randn(3, 5, 20)
        if use_cuda:
            input_t = input_t.cuda()
        output_t = sbn(input_t)

        expected = reference(gather(input_t, world_size))
        found = gather(output_t.detach(), world_size)
        difference = max(difference, (found - expected).abs().max().item())
    difference = max(difference, (sbn.running_var - reference.running_var).abs().max().item())

    if rank == 0:
        print(
            f"{world_size} rank(s), {args.steps} batches: the largest difference to "
            f"torch.nn.BatchNorm1d on the whole batch is {difference:.1e}.",
            flush=True,
        )
    dist.destroy_process_group()
    if difference > 1e-4:
        support.fail(f"rank {rank}: a difference of {difference} is too large.")


def gather(tensor: torch.Tensor, world_size: int) -> torch.Tensor:
    """The ranks' tensors [N, ...] concatenated to [world_size * N, ...], on every rank."""
    parts = [torch.empty_like(tensor) for _ in range(world_size)]
    dist.all_gather(parts, tensor)
    return torch.cat(parts)


if __name__ == "__main__":
    main()
