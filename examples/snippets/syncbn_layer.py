# SPDX-License-Identifier: BSD-3-Clause
"""A synchronized batch norm as a layer of its own, compared with torch's on the whole batch.

    python syncbn_layer.py
    python -m apex.parallel.multiproc --nproc 2 syncbn_layer.py

Every rank normalizes its own batch [3, 5, 20] with the statistics of all ranks' batches. Gathered
on every rank, these outputs are what torch.nn.BatchNorm1d makes of the whole batch in one process.
"""

import argparse
import os

import torch
import torch.distributed as dist
from tqdm import tqdm

import apex


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", default=20, type=int, help="batches to normalize; default: 20")
    parser.add_argument(
        "--local_rank",
        "--local-rank",
        default=int(os.environ.get("LOCAL_RANK", 0)),
        type=int,
        help="index of this process on its machine; launchers set it",
    )
    args = parser.parse_args()

    if "WORLD_SIZE" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", args.local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)

    sbn = apex.parallel.SyncBatchNorm(5)
    if use_cuda:
        sbn = sbn.cuda()
    reference = torch.nn.BatchNorm1d(5).to(device)

    difference = 0.0
    for _ in tqdm(range(args.steps), desc="batches", disable=rank != 0):
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
        raise SystemExit(
            f"syncbn_layer.py: rank {rank}: a difference of {difference} is too large."
        )


def gather(tensor: torch.Tensor, world_size: int) -> torch.Tensor:
    """The ranks' tensors [N, ...] one below the other, [world_size * N, ...], on every rank."""
    parts = [torch.empty_like(tensor) for _ in range(world_size)]
    dist.all_gather(parts, tensor)
    return torch.cat(parts)


if __name__ == "__main__":
    main()
