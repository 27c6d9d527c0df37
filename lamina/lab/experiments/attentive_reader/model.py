"""The attentive reader of section 6.2, exactly as the paper's code has it, and its training on cloze questions."""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....layers import Linear
from ....recurrent import LSTM
from ...data.questions import QuestionData, Questions, load_questions
from ...data.registry import EMBEDDED
from ...protocol import Evaluation, Loss
from ...training.batches import Batches, BucketedBatches, ShuffledBatches
from ...training.draws import Draws
from . import pictures
from .entities import numbers_by_id, random_names, renamed
from .settings import CONTROLS, ReaderConfig

SMALL, FULL = 0.05, 1.0  # scales of orthogonal start values
SEED = 123  # the authors seed with it before every matrix
LSTM_NORMS = {"layer": "layer", "layer01": "layer", "batch": "batch", "batch_everywhere": "batch"}
GAINS = {"layer": 1.0, "layer01": 0.1, "batch": 0.1, "batch_everywhere": 0.1}
SHOWN = 10  # validation questions whose attention is shown

Batch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # passages, their lengths, queries, their lengths, answers


def load(config: ReaderConfig, root: str | None) -> QuestionData:
    return _load(config.dataset, root, config.vocabulary, config.relabel)


@lru_cache(maxsize=2)
def _load(dataset: str, root: str | None, vocabulary: int, relabel: int) -> QuestionData:
    """Read the questions once for all runs of a process."""
    return load_questions(dataset, root, vocabulary or None, relabel=relabel)


class AttentiveReader(nn.Module):
    """Reads a passage and a query with a blank; returns how likely each answer is, and where it looked.

    p_t: states of the passage's LSTM; q: last state of the query's. Letters as in the authors' code:

        s_t = (p_t A) . (q A);  m_t = tanh(p_t Wc + bc + q Wq + s_t)
        alpha = softmax_t(w . m_t);  r = sum_t alpha_t p_t
        log P = log_softmax(tanh(r Wr + q Wo + bo + mean_t(p_t) Wm) Wl + bl)

    The first h of either LSTM is learned, the first c stays 0: its parameter is frozen.
    """

    entities: Tensor  # [E], ids
    numbers: Tensor  # [words], number of the entity with each id, or -1

    def __init__(self, words: int, entities: Tensor, config: ReaderConfig) -> None:
        super().__init__()
        self.config, units = config, config.units
        self.register_buffer("entities", entities.clone())
        self.register_buffer("numbers", numbers_by_id(entities, words))
        self.words = nn.Embedding(words, units)
        options: dict[str, Any] = {"norm": LSTM_NORMS.get(config.norm), "gain_init": GAINS.get(config.norm)}
        recurrent = {**options, "learn_initial_state": True, "eval_statistics": config.statistics}
        self.passage, self.query = LSTM(units, units, **recurrent), LSTM(units, units, **recurrent)
        everywhere = options if config.norm == "batch_everywhere" else {"norm": None}
        linear = partial(Linear, units, units, **everywhere)
        self.likeness = nn.Parameter(torch.empty(units, units))  # A
        self.content = linear()  # Wc, bc
        self.asked = linear(bias=False)  # Wq
        self.weigh = nn.Linear(units, 1, bias=False)  # w
        self.recalled = linear(bias=False)  # Wr
        self.replied = linear()  # Wo, bo
        self.skipped = linear(bias=False)  # Wm
        self.answer = nn.Linear(units, words)  # Wl, bl
        self._freeze()
        self.reset_parameters()

    def _freeze(self) -> None:
        """Freeze what the authors' code does not have.

        Without a norm it adds one bias twice, and two biases learn just that. Batch norm's gates have one bias.
        """
        for lstm in (self.passage, self.query):
            lstm.get_parameter("initial_c_l0").requires_grad_(False)
            if lstm.norm == "batch":
                lstm.get_parameter("bias_hh_l0").requires_grad_(False)
        if self.config.statistics == "batch":
            for layer in self.modules():
                if isinstance(layer, Linear) and layer.statistics is not None:
                    layer.statistics.track_running_stats = False  # then evaluations take the batch's

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw start values: square blocks orthogonal times 0.05, other matrices uniform; biases are 0."""
        for name, parameter in self.named_parameters():
            recurrent = name.startswith(("passage.", "query."))
            if parameter.dim() == 2:
                scale = FULL if recurrent and self.config.norm == "none_scaled" else SMALL
                for block in parameter.chunk(4 if recurrent else 1):
                    self._draw(block, scale)
            elif "bias" in name:
                nn.init.zeros_(parameter)

    def _draw(self, block: Tensor, scale: float) -> None:
        again = torch.Generator(block.device).manual_seed(SEED) if self.config.start == "same" else None
        if block.shape[0] == block.shape[1]:
            nn.init.orthogonal_(block, scale, again)
        else:
            bound = (6 / (sum(block.shape) + 1)) ** 0.5
            nn.init.uniform_(block, -bound, bound, again)

    def forward(
        self, passages: Tensor, lengths: Tensor, queries: Tensor, query_lengths: Tensor, draws: Draws | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of all words [B, words] and attention [B, T], which is 0 in the padding.

        passages, queries: ids [B, T], whatever stands beyond the lengths. draws: of dropout, or None for none.
        """
        states, _ = self._states(self.passage, passages, lengths, draws)
        _, query = self._states(self.query, queries, query_lengths, draws)
        inside = torch.arange(len(states), device=states.device).unsqueeze(1) < lengths
        attention = self._attention(states, query, inside)
        mean = states.masked_fill(~inside.unsqueeze(2), 0).sum(0) / lengths.unsqueeze(1)
        found = (attention.unsqueeze(2) * states).sum(0)
        out = torch.tanh(self.recalled(found) + self.replied(query) + self.skipped(mean))
        logits = self.answer(self._dropped(out, draws))
        if self.config.answers == "entities":
            logits = logits.masked_fill(self.numbers < 0, -torch.inf)
        return logits.log_softmax(1), attention.T

    def _states(self, lstm: LSTM, ids: Tensor, lengths: Tensor, draws: Draws | None) -> tuple[Tensor, Tensor]:
        """Return all states of an LSTM, [T, B, d], and the last within each length, [B, d].

        With cyclic padding the LSTM runs over it, and so do batch norm's statistics. The authors' code holds the state
        of a sequence that has ended; ours runs on, and nothing but the statistics reads it.
        """
        if self.config.padding == "left_out":
            states, (last, _) = lstm(self._dropped(self.words(ids), draws).transpose(0, 1), lengths=lengths)
            return states, last[0]
        states, _ = lstm(self._dropped(self.words(cyclic(ids, lengths)), draws).transpose(0, 1))
        return states, states[lengths - 1, torch.arange(len(ids), device=ids.device)]

    def _attention(self, states: Tensor, query: Tensor, inside: Tensor) -> Tensor:
        """Return the weights of all positions, [T, B]."""
        pull = query @ self.likeness @ self.likeness.T  # (p A) . (q A) = p . (q A A'): a product of B rows, not B T
        same = (states * pull).sum(2)
        met = torch.tanh(self._contents(states, inside) + self.asked(query) + same.unsqueeze(2))
        weights: Tensor = self.weigh(met).squeeze(2).masked_fill(~inside, -torch.inf).softmax(0)
        return weights

    def _contents(self, states: Tensor, inside: Tensor) -> Tensor:
        """Return p_t Wc + bc; batch norm's statistics leave out padding that the LSTMs leave out."""
        if self.content.norm is None or self.config.padding == "cyclic":
            contents: Tensor = self.content(states)
            return contents
        rows: Tensor = self.content(states[inside])
        return torch.zeros_like(states, dtype=rows.dtype).masked_scatter(inside.unsqueeze(2), rows)

    def _dropped(self, x: Tensor, draws: Draws | None) -> Tensor:
        """Return x [B, ...] with some of its values 0 and the others larger; as it is in evaluations."""
        rate = self.config.dropout
        if draws is None or not rate:
            return x
        kept = draws.uniform(*x.shape[1:]) >= rate
        return x * kept.to(x.dtype) / (1 - rate)

    @torch.no_grad()
    def read(self, passages: Tensor, lengths: Tensor, queries: Tensor, query_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return what ``forward`` does in evaluation, whatever the mode; dropout is off."""
        training = self.training
        self.eval()
        found = self(passages, lengths, queries, query_lengths)
        self.train(training)
        return found  # type: ignore[no-any-return]


def cyclic(ids: Tensor, lengths: Tensor) -> Tensor:
    """Return ids [B, T] with each sequence repeated to the end of its row."""
    steps = torch.arange(ids.shape[1], device=ids.device)
    return ids.gather(1, steps % lengths.unsqueeze(1))


def _beyond(ids: Tensor, lengths: Tensor) -> Tensor:
    return torch.arange(ids.shape[1], device=ids.device) >= lengths.unsqueeze(1)


def build(config: ReaderConfig, data: QuestionData) -> AttentiveReader:
    reader = AttentiveReader(len(data.vocabulary), data.entities, config)
    if config.answer_start == "frequency":
        with torch.no_grad():
            reader.answer.bias.copy_(log_frequencies(data, renamed=config.permutation != "none"))
    return reader


def log_frequencies(data: QuestionData, renamed: bool) -> Tensor:
    """Return the log frequency of each word as an answer in training, each counted once more than it is.

    renamed: training renames entities at random, so that all are answers equally often.
    """
    counts = torch.bincount(data.splits["train"].answers, minlength=len(data.vocabulary)).double() + 1
    if renamed:
        counts[data.entities] = counts[data.entities].mean()
    return (counts / counts.sum()).log()


def batches(config: ReaderConfig, data: QuestionData, seed: int) -> Batches:
    passages = data.splits["train"].passages
    if config.buckets:
        lengths = passages.offsets.diff().tolist()
        return BucketedBatches(lengths, config.batch_size, seed, config.buckets, drop_last=True)
    return ShuffledBatches(len(passages), config.batch_size, seed, drop_last=True)


def batch(data: QuestionData, index: Tensor) -> Batch:
    return _taken(data.splits["train"], index)


def _taken(split: Questions, index: Tensor) -> Batch:
    """Return questions, padded to the longest passage and query among them."""
    answers = split.answers[index.to(split.answers.device)]
    return *split.passages.padded(index), *split.queries.padded(index), answers


def loss(model: nn.Module, batch: Batch, draws: Draws) -> Loss:
    """Return the negative log-likelihood of the answers, summed, under random names of the entities."""
    reader = cast(AttentiveReader, getattr(model, "module", model))  # DistributedDataParallel wraps it
    passages, lengths, queries, query_lengths, answers = with_random_names(reader, batch, draws)
    found, _ = model(passages, lengths, queries, query_lengths, draws)
    return Loss(F.nll_loss(found, answers, reduction="sum"), len(answers))


def with_random_names(reader: AttentiveReader, batch: Batch, draws: Draws) -> Batch:
    """Return a batch whose entities have new names, the same in passage, query and answer."""
    if reader.config.permutation == "none":
        return batch
    passages, lengths, queries, query_lengths, answers = batch
    names = random_names(draws, len(reader.entities), reader.config.permutation == "question")
    sides = (renamed(ids, names, reader.entities, reader.numbers) for ids in (passages, queries, answers.unsqueeze(1)))
    passages, queries, answers = sides
    return passages, lengths, queries, query_lengths, answers.squeeze(1)


def evaluations(config: ReaderConfig) -> tuple[Evaluation, ...]:
    return Evaluation("validation", validate), Evaluation("all questions", measure_all, at_best=True)


def validate(model: Any, data: QuestionData, config: ReaderConfig, *_: Any) -> dict[str, Tensor]:
    """Return error and loss on a fixed part of the validation questions, spread over all of them."""
    split = data.splits["valid"]
    total = len(split.answers)
    count = min(config.valid_questions or total, total)
    correct, losses = measured(model, split, torch.arange(count) * total // count)
    return {"valid_error": 1 - correct.mean(), "valid_nll": losses.mean()}


def measure_all(model: Any, data: QuestionData, config: ReaderConfig, *_: Any) -> dict[str, Tensor]:
    """Return errors on all validation and test questions, those of the controls, and each test answer, 1 if right."""
    wrong = {
        name: 1 - measured(model, split, torch.arange(len(split.answers)))[0]
        for name, split in data.splits.items()
        if name != "train"
    }
    known = data.controls["valid"]
    controls = {f"valid_{name}": torch.tensor(known[name]) for name in CONTROLS}
    controls["valid_answer_absent"] = torch.tensor(1 - known["answer_present"])
    return {
        "valid_all_error": wrong["valid"].mean(),
        "test_error": wrong["test"].mean(),
        "test_correct": 1 - wrong["test"],
        **controls,
    }


@torch.no_grad()
def measured(model: AttentiveReader, split: Questions, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each question whether it was answered, and the negative log-likelihood of its answer.

    Batches have the size of training's. The last questions that do not fill one are left out, as the authors do, unless
    there is no other: batch norm's statistics are of the batch.
    """
    size = min(model.config.batch_size, len(chosen))
    chosen = chosen[: len(chosen) // size * size]
    lengths = split.passages.offsets.diff().cpu()[chosen]
    order = lengths.argsort(stable=True) if model.config.buckets else torch.arange(len(chosen))
    parts = [_measured_batch(model, _taken(split, part)) for part in torch.split(chosen[order], size)]
    correct, losses = (torch.cat(side)[order.argsort().to(side[0].device)] for side in zip(*parts))
    return correct, losses


def _measured_batch(model: AttentiveReader, batch: Batch) -> tuple[Tensor, Tensor]:
    device = model.entities.device
    *inputs, answers = (tensor.to(device) for tensor in batch)
    found, _ = model.read(*inputs)
    return (found.argmax(1) == answers).float(), F.nll_loss(found, answers, reduction="none").float()


def inspect(model: AttentiveReader, data: QuestionData, config: ReaderConfig) -> dict[str, list[float]]:
    """Return nothing beyond the curves and the test answers."""
    return {}


def artefacts(model: AttentiveReader, data: QuestionData, config: ReaderConfig, draws: Draws, folder: Path) -> None:
    """Draw the attention to the first validation questions of the stand-in.

    Reports copy pictures. The text of real questions must not get into them, and ``lamina read`` shows it.
    """
    if data.kind != EMBEDDED:
        return
    split, words = data.splits["valid"], data.vocabulary.words
    size = min(max(config.batch_size, SHOWN), len(split.answers))  # a whole batch, for batch norm's statistics
    passages, lengths, queries, query_lengths, answers = _taken(split, torch.arange(size))
    found, attention = model.read(passages, lengths, queries, query_lengths)
    guesses = found.argmax(1)
    shown = [
        pictures.Reading(
            passage=[words[n] for n in passages[i, : lengths[i]].tolist()],
            attention=attention[i, : lengths[i]].tolist(),
            query=[words[n] for n in queries[i, : query_lengths[i]].tolist()],
            answer=words[int(answers[i])],
            guess=words[int(guesses[i])],
        )
        for i in range(min(SHOWN, size))
    ]
    (folder / "attention.svg").write_text(pictures.drawn(shown), encoding="utf-8")
