"""CPU seconds of an update of order embeddings on one thread: ours, and the same model in eager PyTorch.

    python benchmarks/order_embeddings.py --out results/bench-order.json

Laptop scale: 1,024 units, words of 300 numbers, 128 pairs; made-up captions with lengths like Flickr8k's. The eager
model steps through all of the padding, keeps all 128 x 128 x 1,024 differences for autograd, and takes torch's Adam.
Losses and gradients of the two are compared before any timing. Both see the same batches, in turn.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import torch
from speed import eager_gru
from torch import Tensor, nn
from torch.nn import functional as F

from lamina.lab.experiments.order_embeddings.model import OrderEmbedding
from lamina.lab.experiments.order_embeddings.scores import ranking_loss, scores
from lamina.lab.experiments.order_embeddings.settings import SHEET, OrderConfig
from lamina.lab.reports import records
from lamina.optim import Adam, clip_gradients

FEATURES, WORDS = 1280, 7632  # of Flickr8k
WARM_UP, ALLOWED, RATIO = 2, 0.40, 0.5  # updates, CPU seconds, share of the eager model's
Batch = tuple[Tensor, Tensor, Tensor]


def drawn(config: OrderConfig, seed: int) -> Batch:
    """Return a batch: features, padded words, lengths of 13 words on average and about 30 at most."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.empty(config.batch_size).log_normal_(2.49, 0.33, generator=generator).round().clamp(4, 39).long()
    words = torch.randint(2, WORDS, (config.batch_size, int(lengths.max())), generator=generator)
    features = torch.rand(config.batch_size, FEATURES, generator=generator)
    return F.normalize(features, dim=1), words * (torch.arange(words.shape[1]) < lengths[:, None]), lengths


def ours(model: OrderEmbedding, batch: Batch) -> Tensor:
    features, words, lengths = batch
    return ranking_loss(scores(model.sentences(words, lengths), model.images(features), model.score), model.margin)


def eager(model: OrderEmbedding, batch: Batch) -> Tensor:
    """The same loss as people write it, with the same parameters."""
    features, words, lengths = batch
    states = eager_gru(model.reader, model.words(words.T))
    s = F.normalize(states[lengths - 1, torch.arange(len(lengths))], dim=1).abs()
    v = F.normalize(model.image(features), dim=1).abs()
    errors = (s.unsqueeze(1) - v).clamp(min=0).pow(2).sum(2)
    right = errors.diagonal()
    hinges = (model.margin - errors + right).clamp(min=0) + (model.margin - errors + right.unsqueeze(1)).clamp(min=0)
    return hinges.masked_fill(torch.eye(len(hinges), dtype=torch.bool), 0).sum()


def ours_after(model: nn.Module, optimizer: Any) -> None:
    clip_gradients(list(model.parameters()), 2.0, "tensor")
    optimizer.step()


def eager_after(model: nn.Module, optimizer: Any) -> None:
    for parameter in model.parameters():
        nn.utils.clip_grad_norm_([parameter], 2.0)
    optimizer.step()


def check(models: dict[str, OrderEmbedding], batch: Batch) -> float:
    """Return the largest relative difference of the gradients; raise if the contenders compute different things."""
    losses = {name: {"ours": ours, "eager": eager}[name](model, batch) for name, model in models.items()}
    for loss in losses.values():
        loss.backward()
    pairs = zip(models["ours"].parameters(), models["eager"].parameters())
    worst = max(float((a.grad - b.grad).norm() / b.grad.norm()) for a, b in pairs)
    if abs(float(losses["ours"].detach() / losses["eager"].detach()) - 1) > 1e-4 or worst > 1e-3:
        raise RuntimeError(f"losses {losses}, gradients {worst:.2g} apart: not timed")
    return worst


def measure(rounds: int, config: OrderConfig) -> dict[str, Any]:
    """Return CPU seconds of each contender's updates."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = OrderEmbedding(FEATURES, WORDS, config)
    models = {"ours": model, "eager": copy.deepcopy(model)}
    difference = check(models, drawn(config, 0))
    optimizers = {"ours": Adam(model.parameters(), 1e-3), "eager": torch.optim.Adam(models["eager"].parameters(), 1e-3)}
    losses, after = {"ours": ours, "eager": eager}, {"ours": ours_after, "eager": eager_after}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for number in range(WARM_UP + rounds):
        batch = drawn(config, number)
        for name in models:
            began = time.process_time()
            optimizers[name].zero_grad(set_to_none=True)
            losses[name](models[name], batch).backward()
            after[name](models[name], optimizers[name])
            seconds[name].append(time.process_time() - began)
    return {"difference": difference, "seconds": {name: times[WARM_UP:] for name, times in seconds.items()}}


def record_of(found: dict[str, Any], config: OrderConfig) -> dict[str, Any]:
    medians = {name: statistics.median(times) for name, times in found["seconds"].items()}
    ratio = medians["ours"] / medians["eager"]
    row = [str(config.units), f"{medians['ours']:.3f}", f"{medians['eager']:.3f}", f"{ratio:.2f}"]
    columns = ["Units", "Ours, CPU s", "Eager PyTorch, CPU s", "Ratio"]
    return {
        "schema": records.SCHEMA, "kind": "bench", "name": "order", "experiment": SHEET.name,
        "environment": records.environment(),
        "title": "An update of order embeddings on one thread of a CPU", "rows": [{"units": config.units, **found}],
        "command": "python benchmarks/order_embeddings.py", "passed": medians["ours"] <= ALLOWED and ratio <= RATIO,
        "tables": [{"caption": "Median CPU seconds of an update of 128 pairs", "columns": columns, "rows": [row]}],
        "about": f"Allowed: {ALLOWED} CPU seconds, and {RATIO:g} of the eager model's. Layer norm, order score, "
        "clipping and Adam as published; both contenders on the same batches, in turn.",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="results/bench-order.json")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    config = OrderConfig(**{**SHEET.scales["laptop"].settings, "norm": "layer"})
    record = record_of(measure(given.rounds, config), config)
    for line in record["tables"][0]["rows"]:
        print(*(f"{name} {value}" for name, value in zip(record["tables"][0]["columns"], line)), sep="; ")
    out = Path(given.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
