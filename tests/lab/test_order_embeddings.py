"""Order embeddings: scores and loss against their definitions, metrics by hand, start values, batches, runs."""

from __future__ import annotations


import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

from lamina.errors import InputError
from lamina.lab.cli import jobs as plan
from lamina.lab.data.captions import PER_IMAGE, CaptionData, CaptionedImages
from lamina.lab.experiment import Job
from lamina.lab.experiments.order_embeddings import metrics, model, scores
from lamina.lab.experiments.order_embeddings.settings import MARGINS, SHEET, OrderConfig
from lamina.lab.options import Settings
from lamina.lab.runs.folder import RunFolder
from lamina.lab.training.batches import generator
from lamina.lab.training.loop import train
from tests.lab import kills

# Scores and loss


def rows(count: int, units: int, seed: int, dtype=torch.float64) -> torch.Tensor:
    drawn = torch.rand(count, units, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return drawn / drawn.norm(dim=1, keepdim=True)


def defined(captions, images, kind):
    """The score of each pair, one by one."""
    pairs = [
        [(-(s * v).sum() if kind == "cosine" else sum(max(0.0, float(d)) ** 2 for d in s - v)) for v in images]
        for s in captions
    ]
    return torch.tensor([[float(score) for score in row] for row in pairs], dtype=torch.float64)


def defined_loss(matrix, margin):
    pairs = [(i, j) for i in range(len(matrix)) for j in range(len(matrix)) if i != j]
    right = [float(matrix[i, i]) for i in range(len(matrix))]
    return sum(
        max(0.0, margin - float(matrix[i, j]) + right[j]) + max(0.0, margin - float(matrix[i, j]) + right[i])
        for i, j in pairs
    )


@pytest.mark.parametrize("kind", scores.KINDS)
@pytest.mark.parametrize(("captions", "images", "units"), [(1, 1, 1), (2, 17, 5), (17, 2, 33), (13, 12, 64)])
def test_scores_are_the_definition(kind, captions, images, units):
    s, v = rows(captions, units, 0), rows(images, units, 1)
    assert torch.allclose(scores.scores(s, v, kind), defined(s, v, kind), atol=1e-12)


@pytest.mark.parametrize("limit", [1, 7, 1000, 2**18])
@pytest.mark.parametrize(("cases", "units"), [(1, 3), (2, 17), (17, 100), (129, 33)])
def test_blocks_of_any_size_give_score_and_gradients_of_plain_broadcasting(monkeypatch, limit, cases, units):
    if limit < cases * units / 400:
        pytest.skip("thousands of tiny blocks")
    monkeypatch.setattr(scores, "ON_CPU", limit)
    s, v, g = rows(cases, units, 0), rows(cases + 1, units, 1), rows(cases, cases + 1, 2) - 0.1
    ours, plain = ([x.clone().requires_grad_() for x in (s, v)] for _ in range(2))
    found = scores.scores(*ours, "order")
    wanted = (plain[0].unsqueeze(1) - plain[1]).clamp(min=0).square().sum(2)
    found.backward(g)
    wanted.backward(g)
    assert torch.allclose(found, wanted, atol=1e-13)
    assert all(torch.allclose(a.grad, b.grad, atol=1e-13) for a, b in zip(ours, plain))


@pytest.mark.parametrize("kind", scores.KINDS)
@pytest.mark.parametrize("cases", [2, 9])
def test_the_loss_is_its_definition_and_its_gradient_that_of_finite_differences(kind, cases):
    s, v = rows(cases, 6, 3).requires_grad_(), rows(cases, 6, 4).requires_grad_()

    def loss(s, v):
        return scores.ranking_loss(scores.scores(s, v, kind), MARGINS[kind])

    assert float(loss(s, v).detach()) == pytest.approx(
        defined_loss(defined(s.detach(), v.detach(), kind), MARGINS[kind])
    )
    assert float(loss(s, v).detach()) > 0
    assert gradcheck(loss, (s, v), eps=1e-7, atol=1e-6)
