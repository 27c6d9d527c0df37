"""The model of section 6.3: one GRU reads a sentence, two others write the sentences before and after it."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ....errors import fail
from ....recurrent import GRU
from ...data.books import BookData, load_books
from ...data.text import Ragged
from ...protocol import Evaluation, Loss
from ...training.draws import Draws
from .settings import SkipConfig
from .softmax import chunked_loss, sampled_loss, word_losses
from .triples import EqualLengths, Triples, taken, usable, words_in

TOGETHER = 128  # triples of one batch of an evaluation
SMOOTH = 0.75  # power of the counts that words are sampled by


def load(config: SkipConfig, root: str | None) -> BookData:
    return _load(config.dataset, root, config.vocabulary)


@lru_cache(maxsize=2)
def _load(dataset: str, root: str | None, vocabulary: int) -> BookData:
    """Read and number the books once for all runs of a process."""
    return load_books(dataset, root, vocabulary or None)


class SkipThoughts(nn.Module):
    """Encodes a sentence as the last state of a GRU, from which two other GRUs begin to write its neighbours.

    Embedding and output layer are shared by all three.
    """

    log_chances: Tensor  # [words], of being drawn by the sampled softmax

    def __init__(self, counts: Tensor, config: SkipConfig) -> None:
        super().__init__()
        self.config, words, units = config, len(counts), config.units
        self.register_buffer("log_chances", _log_chances(counts), persistent=False)
        norm = None if config.norm == "none" else config.norm
        given = units if config.conditioning == "every_step" else 0
        self.words = nn.Embedding(words, config.word_size)
        self.encoder = GRU(config.word_size, units, norm=norm)
        self.before = GRU(config.word_size + given, units, norm=norm)
        self.after = GRU(config.word_size + given, units, norm=norm)
        self.output = nn.Linear(units, words)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw start values as the authors' code does, block by block of the gates."""
        nn.init.uniform_(self.words.weight, -0.1, 0.1)
        nn.init.uniform_(self.output.weight, -0.1, 0.1)
        nn.init.zeros_(self.output.bias)
        for gru in (self.encoder, self.before, self.after):
            for name, parameter in gru.named_parameters():
                if name.startswith("weight"):
                    _draw(parameter, self.config)
                elif name.startswith("bias"):
                    nn.init.zeros_(parameter)
            if gru.norm is None:  # the authors' baseline has no biases on the state's side
                gru.get_parameter("bias_hh_l0").requires_grad_(False)

    def encode(self, words: Tensor, lengths: Tensor) -> Tensor:
        """Return sentences as vectors, [B, units]: the state after the last of so many words, [B, T]."""
        return self.read(self.words(words.T), lengths)

    def read(self, embedded: Tensor, lengths: Tensor) -> Tensor:
        """Return what ``encode`` does for embeddings of words, [T, B, word_size], which may be of an expanded table."""
        return self.encoder(embedded, lengths=lengths)[1][0]  # type: ignore[no-any-return]

    def states(self, triples: Triples) -> tuple[Tensor, Tensor, Tensor]:
        """Return the decoders' states before each word of both neighbours, those words, and their cases.

        Padding is left out: half of the positions of a padded batch would be empty.
        """
        vectors = self.encode(triples.middle, triples.middle_lengths)
        sides = (
            (self.before, triples.before, triples.before_lengths),
            (self.after, triples.after, triples.after_lengths),
        )
        parts = [self._decoded(gru, vectors, words, lengths) for gru, words, lengths in sides]
        states, words, cases = (torch.cat(part) for part in zip(*parts))
        return states, words.long(), cases

    def _decoded(self, gru: GRU, vectors: Tensor, words: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what ``states`` does for one decoder. It reads the words one step late, after a vector of zeros."""
        known = self.words(words[:, :-1].T)
        inputs = torch.cat([known.new_zeros(1, *known.shape[1:]), known])
        if self.config.conditioning == "every_step":
            inputs = torch.cat([inputs, vectors.expand(len(inputs), -1, -1)], 2)
        states, _ = gru(inputs, vectors.unsqueeze(0), lengths=lengths)
        inside = torch.arange(len(states), device=words.device).unsqueeze(1) < lengths
        cases = torch.arange(len(words), device=words.device).expand(inside.shape)
        return states[inside], words.T[inside], cases[inside]

    def forward(self, triples: Triples, draws: Draws) -> Tensor:
        """Return the loss of all words of both neighbours, summed as in the authors' code."""
        states, words, _ = self.states(triples)
        weight, bias = self.output.weight, self.output.bias
        if self.config.softmax == "full":
            return chunked_loss(states, weight, bias, words, self.config.floor)
        samples = torch.multinomial(self.log_chances.exp(), self.config.samples, True, generator=draws.once())
        return sampled_loss(states, weight, bias, words, samples, self.log_chances)

    @torch.no_grad()
    def measure(self, triples: Triples) -> tuple[Tensor, Tensor]:
        """Return the negative log-likelihood of each case's neighbours under the full softmax, and their words."""
        states, words, cases = self.states(triples)
        losses = word_losses(states, self.output.weight, self.output.bias, words).double()
        totals = losses.new_zeros(len(triples.middle)).index_add_(0, cases, losses)
        return totals, torch.bincount(cases, minlength=len(totals))


def _log_chances(counts: Tensor) -> Tensor:
    chances = (counts.float() + 1) ** SMOOTH
    return (chances / chances.sum()).log()


def _draw(weight: Tensor, config: SkipConfig) -> None:
    """Draw one matrix of a GRU, whose inputs are a word, a state, or a word and a sentence."""
    parts = [weight.shape[1]]
    if weight.shape[1] == config.word_size + config.units:
        parts = [config.word_size, config.units]
    for gate in weight.chunk(3):
        for block in torch.split(gate, parts, 1):
            if block.shape[0] == block.shape[1]:
                nn.init.orthogonal_(block)
            else:
                nn.init.uniform_(block, -0.1, 0.1)


def build(config: SkipConfig, data: BookData) -> SkipThoughts:
    return SkipThoughts(data.counts, config)


def batches(config: SkipConfig, data: BookData, seed: int) -> EqualLengths:
    return EqualLengths(words_in(data.splits["train"]), config.longest, config.batch_size, seed)


def batch(data: BookData, index: Tensor) -> Triples:
    return taken(data.splits["train"], index)


def loss(model: nn.Module, batch: Triples, draws: Draws) -> Loss:
    """Return the summed loss. It is divided by nothing: the weights of a batch's parts sum up to 1."""
    part = 1 if draws.cases == draws.of else torch.tensor(draws.cases / draws.of, dtype=torch.float64)
    return Loss(model(batch, draws), part)


def evaluations(config: SkipConfig) -> tuple[Evaluation, ...]:
    return Evaluation("validation", validate), Evaluation("test", test, at_best=True)


def validate(model: Any, data: BookData, config: SkipConfig, *_: Any) -> dict[str, Tensor]:
    """Return the loss per word on a fixed part of the validation triples, spread over all of them."""
    losses, words = measured(model, data.splits["valid"], held_out(data, "valid", config))
    return {"valid_nll": losses.sum() / words.sum()}


def test(model: Any, data: BookData, config: SkipConfig, *_: Any) -> dict[str, Tensor]:
    """Return the loss per word on test triples, that of each triple, and the loss of the words' frequencies.

    The losses of single triples are divided by the mean number of words, so that their mean is the loss per word.
    """
    chosen = held_out(data, "test", config)
    losses, words = measured(model, data.splits["test"], chosen)
    mean = words.double().mean()
    valid = by_frequency(data, data.splits["valid"], held_out(data, "valid", config))
    return {
        "test_nll": losses.mean() / mean,
        "test_losses": losses / mean,
        "test_frequency_nll": by_frequency(data, data.splits["test"], chosen),
        "valid_frequency_nll": valid,
    }


def held_out(data: BookData, split: str, config: SkipConfig) -> Tensor:
    """Return a fixed part of a split's triples, as numbers of their middle sentences."""
    middles = usable(words_in(data.splits[split]), config.longest)
    total = len(middles)
    if not total:
        rule = f"the {split} part of {data.label} must hold three sentences in a row shorter than --longest"
        raise fail(rule, f"none below {config.longest} words", "Pass a larger --longest, or bring other text.")
    count = min(config.valid_triples or total, total)
    return middles[torch.arange(count, device=middles.device) * total // count]


def measured(model: SkipThoughts, sentences: Ragged, middles: Tensor) -> tuple[Tensor, Tensor]:
    """Return the negative log-likelihood of each triple's neighbours, and how many words they have."""
    order = words_in(sentences)[middles].argsort(stable=True)
    device = model.output.weight.device
    batches = (taken(sentences, part) for part in torch.split(middles[order], TOGETHER))
    parts = [model.measure(Triples(*(tensor.to(device) for tensor in one))) for one in batches]
    losses, words = (torch.cat(side)[order.argsort().to(device)] for side in zip(*parts))
    return losses, words


def by_frequency(data: BookData, sentences: Ragged, middles: Tensor) -> Tensor:
    """Return the loss per word of guessing words by how often training has them: what needs no reading."""
    counts = data.counts.double() + 1
    losses = -(counts / counts.sum()).log()
    found = [side for part in torch.split(middles, TOGETHER) for side in _neighbours(sentences, part)]
    return losses[torch.cat(found)].mean()


def _neighbours(sentences: Ragged, middles: Tensor) -> list[Tensor]:
    """Return the words of the sentences before and after others."""
    sides = (sentences.padded(middles + step) for step in (-1, 1))
    return [ids[torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(1)].long() for ids, lengths in sides]


def inspect(model: SkipThoughts, data: BookData, config: SkipConfig) -> dict[str, list[float]]:
    """Return nothing beyond the curves and the test losses."""
    return {}


def artefacts(model: SkipThoughts, data: BookData, config: SkipConfig, draws: Draws, folder: Path) -> None:
    """Write nothing: vectors of sentences are judged by tasks of their own."""
