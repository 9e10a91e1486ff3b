# SPDX-License-Identifier: BSD-3-Clause
"""Step 1 of the tutorial: train on one process."""

import argparse
import sys
from datetime import datetime
from pathlib import Path

import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[1]))
import digits
import example_support as support


class ConvNet(nn.Module):
    """Two convolutions with batch norm and a linear layer: [N, 1, 28, 28] -> [N, 10]."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=5, stride=1, padding=2),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=2, stride=2),
        )
        self.layer2 = nn.Sequential(
            nn.Conv2d(16, 32, kernel_size=5, stride=1, padding=2),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=2, stride=2),
        )
        self.fc = nn.Linear(7 * 7 * 32, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.layer2(self.layer1(x)).flatten(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", "--nodes", default=1, type=int, metavar="N", help="not used yet")
    parser.add_argument("-g", "--gpus", default=1, type=int, help="not used yet")
    parser.add_argument("-nr", "--nr", default=0, type=int, help="not used yet")
    parser.add_argument("--epochs", default=2, type=int, metavar="N", help="epochs; default: 2")
    parser.add_argument("--batch-size", default=100, type=int, help="default: 100")
    parser.add_argument("--lr", default=0.01, type=float, help="learning rate; default: 0.01")
    digits.add_arguments(parser)
    args = parser.parse_args()
    train(0, args)


def train(gpu: int, args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", gpu) if use_cuda else torch.device("cpu")
    model = ConvNet().to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr)

    train_dataset = digits.training_set(args, say=True)
    train_loader = torch.utils.data.DataLoader(
        train_dataset, batch_size=args.batch_size, shuffle=True, pin_memory=use_cuda
    )

    start = datetime.now()
    for epoch in range(args.epochs):
        total = torch.zeros((), device=device)
        for images, labels in support.progress(train_loader, f"epoch {epoch + 1}", rank=0):
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            loss = criterion(model(images), labels)

            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        print(f"epoch {epoch + 1}/{args.epochs}: loss {total.item() / len(train_loader):.4f}")
    print(f"training complete in {datetime.now() - start}")


if __name__ == "__main__":
    main()
