"""RNN, LSTM and GRU: the torch.nn layers with a choice of normalisation.

Constructor, call, parameter names and gate order are those of ``torch.nn``; additional options are keyword-only.
Letters: T steps, B cases, D inputs, H hidden, P = proj_size or H.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from . import functional, notices
from .checks import boolean, describe, fail, one_of, positive_int, probability, readable, show
from .options import Options, with_options
from .placements import STATES
from .recurrence_checks import check_lengths, check_resets
from .recurrent_module import GivenState, RecurrentModule, State
from .reference import Recurrence, SequenceResult
from .scripting import leaf, symbolic


class Start(NamedTuple):
    """Initial state of one cell, and its state after a reset."""

    state: GivenState
    reset_state: GivenState


class RecurrentLayer(RecurrentModule):
    """Stack of recurrent layers over whole sequences, in one or both directions."""

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True, batch_first: bool = False,
        dropout: float = 0.0, bidirectional: bool = False, proj_size: int = 0, device: Any = None, dtype: Any = None,
        *, norm: str | None = "layer", placement: str | None = None, eps: float = 1e-5, eps_mode: str = "var",
        gain_init: float | None = None, forget_bias: float | None = None, zoneout: float | tuple[float, float] = 0.0,
        recurrent_dropout: float = 0.0, learn_initial_state: bool = False, backend: str = "auto",
        recompute: bool = False, momentum: float | None = 0.1, eval_statistics: str = "population",
        max_steps: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(input_size, hidden_size, proj_size, bias, Options.of(locals()), device, dtype)
        _check_projection(self.cell, proj_size, hidden_size)
        self.num_layers = positive_int("num_layers", num_layers)
        self.batch_first = boolean("batch_first", batch_first)
        self.dropout = _check_dropout(dropout, num_layers)
        self.bidirectional = boolean("bidirectional", bidirectional)
        for index, suffix in enumerate(self._suffixes()):
            first = index < self.num_directions
            self._add_cell(suffix, self.input_size if first else self.output_size * self.num_directions)
        self.reset_parameters()

    @property
    def num_directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def mode(self) -> str:
        """Torch's name of the layer type: LSTM, GRU, RNN_TANH or RNN_RELU."""
        return f"RNN_{self.nonlinearity.upper()}" if self.cell == "RNN" else self.cell

    def _suffixes(self) -> list[str]:
        directions = ("", "_reverse")[: self.num_directions]
        return [f"_l{layer}{direction}" for layer in range(self.num_layers) for direction in directions]

    @property
    def all_weights(self) -> list[list[nn.Parameter]]:
        """Parameters of each cell, torch's first."""
        return [list(self._cell_parameters(suffix).values()) for suffix in self._suffixes()]  # type: ignore[arg-type]

    def flatten_parameters(self) -> None:
        """Do nothing: the method exists for compatibility with torch, and there is no flat weight buffer."""

    def extra_repr(self) -> str:
        names = ("proj_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional")
        defaults = dict(zip(names, (0, 1, True, False, 0.0, False)))
        changed = [f"{name}={getattr(self, name)}" for name in names if getattr(self, name) != defaults[name]]
        return ", ".join([f"{self.input_size}, {self.hidden_size}", *changed, *self._option_repr()])

    def permute_hidden(self, hx: Any, permutation: Tensor | None) -> Any:
        """Reorder the cases of a state, as torch.nn does for packed input."""
        if permutation is None:
            return hx
        if isinstance(hx, Tensor):
            return hx.index_select(1, permutation)
        return tuple(h.index_select(1, permutation) for h in hx)

    def forward(
        self, input: Any, hx: Any = None, lengths: Any = None, resets: Tensor | None = None, reset_state: Any = None
    ) -> tuple[Any, Any]:
        """Return outputs [T, B, num_directions * P] in the input's layout and the final state h_n, LSTM (h_n, c_n).

        input: [T, B, D], [B, T, D] with batch_first, [T, D] for one case, or a PackedSequence (returns one too).
        hx: initial state [num_layers * num_directions, B, size], h_0 or for the LSTM (h_0, c_0).
        lengths: number of valid steps of each case, list or int tensor [B]; sorting or packing is not needed. Outputs
            in the padding are 0, and the final state is that of the last valid step.
        resets: bool tensor with the input's first two axes, True at each step that begins a new segment. Before that
            step (in the reverse direction: before the preceding step) the state becomes the default initial state,
            which is zeros or the learned one, regardless of ``hx``. Resets in the padding have no effect.
        reset_state: state after a reset, in the layout of ``hx``, in place of the default one.
        """
        if symbolic(input):
            return leaf(self, input, hx=hx, lengths=lengths, resets=resets, reset_state=reset_state)  # type: ignore[no-any-return]
        output, state = self._run(input, hx, lengths, resets, reset_state)
        return output, state if self.cell == "LSTM" else state[0]

    def _run(self, input: Any, hx: Any, lengths: Any, resets: Tensor | None, reset_state: Any) -> tuple[Any, State]:
        check_resets(resets)
        if isinstance(input, PackedSequence):
            return self._run_packed(input, hx, lengths, resets, reset_state)
        self._check_input(input)
        if input.dim() == 2:
            return self._run_unbatched(input, hx, lengths, resets, reset_state)
        if self.batch_first:
            input = input.transpose(0, 1)
            resets = None if resets is None else self._time_major_resets(resets, input)
        starts = self._starts(hx, resets, reset_state, input, 3)
        output, state = self._run_stack(input, starts, self._lengths(lengths, input), resets)
        return (output.transpose(0, 1) if self.batch_first else output), state

    def _time_major_resets(self, resets: Tensor, time_major: Tensor) -> Tensor:
        check_resets(resets, (time_major.shape[1], time_major.shape[0]))
        return resets.transpose(0, 1)

    def _run_unbatched(
        self, input: Tensor, hx: Any, lengths: Any, resets: Tensor | None, reset_state: Any
    ) -> tuple[Tensor, State]:
        if lengths is not None:
            rule = "lengths= is only for batches, and an unbatched input is one case"
            raise fail(rule, f"input {describe(input)}", "Slice the input to its length instead.")
        if resets is not None:
            check_resets(resets, tuple(input.shape[:1]))
            resets = resets.unsqueeze(1)
        x = input.unsqueeze(1)
        output, state = self._run_stack(x, self._starts(hx, resets, reset_state, x, 2), None, resets)
        return output.squeeze(1), tuple(s.squeeze(1) for s in state)

    def _run_packed(
        self, packed: PackedSequence, hx: Any, lengths: Any, resets: Tensor | None, reset_state: Any
    ) -> tuple[PackedSequence, State]:
        data, batch_sizes, order, inverse = packed
        self._check_packed(packed, lengths)
        sorted_only = PackedSequence(data, batch_sizes)
        x, sizes = pad_packed_sequence(sorted_only)
        if resets is not None:
            resets = self._time_major_resets(resets, x) if self.batch_first else resets
            check_resets(resets, tuple(x.shape[:2]))
            resets = resets if order is None else resets.index_select(1, order)
        hx, reset_state = (
            None if state is None else self.permute_hidden(self._check_hx(state, x, 3, name), order)
            for name, state in (("hx", hx), ("reset_state", reset_state))
        )  # fmt: skip
        starts = self._starts(hx, resets, reset_state, x, 3)
        output, state = self._run_stack(x, starts, _copied_to(sizes, x.device), resets)
        data = pack_padded_sequence(output, sizes).data
        state = self.permute_hidden(state, inverse)
        return PackedSequence(data, batch_sizes, order, inverse), state

    def _run_stack(
        self, x: Tensor, starts: Sequence[Start], lengths: Tensor | None, resets: Tensor | None
    ) -> tuple[Tensor, State]:
        """Run all layers and directions over a time-major batch; final states are stacked as in torch."""
        counts = self._valid_counts(x, lengths)
        resets = resets if resets is None else _copied_to(resets, x.device)
        if self._stacks(x, starts):
            return self._run_as_one(x, starts, lengths, resets)
        finals: list[State] = []
        for layer in range(self.num_layers):
            results = self._run_layer(layer, x, starts, lengths, resets, counts)
            finals += [result.state for result in results]
            outputs = [result.output for result in results]
            x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
            if layer < self.num_layers - 1:
                x = F.dropout(x, self.dropout, self.training)
        return x, tuple(torch.stack(states) for states in zip(*finals))

    def _stacks(self, x: Tensor, starts: Sequence[Start]) -> bool:
        """Return whether one kernel call runs all layers; draws no random numbers."""
        on_gpu = x.is_cuda or self.backend == "triton"
        if self.num_layers == 1 or self.bidirectional or self.norm == "batch" or not x.shape[0] or not on_gpu:
            return False
        first = self._recurrence(self._suffixes()[0], x, starts[0].state)
        return functional.stacks(first, self.num_layers, self.backend)

    def _run_as_one(
        self, x: Tensor, starts: Sequence[Start], lengths: Tensor | None, resets: Tensor | None
    ) -> tuple[Tensor, State]:
        """Run all layers of a unidirectional stack in shared kernel launches."""
        placeholder = x.new_zeros(()).expand(*x.shape[:2], self.output_size)  # expanded: it takes no memory
        inputs = [x] + [placeholder] * (self.num_layers - 1)
        calls = [self._call(*cell, lengths, resets) for cell in zip(self._suffixes(), inputs, starts)]
        masks: list[Tensor | None] = [None] * (self.num_layers - 1)
        if self.training and self.dropout:
            masks = [F.dropout(x.new_ones(call.input.shape), self.dropout) for call in calls[1:]]
        output, finals = functional.run_stack(calls, masks)
        return output, tuple(torch.stack(states) for states in zip(*finals))

    def _run_layer(
        self, layer: int, x: Tensor, starts: Sequence[Start], lengths: Tensor | None, resets: Tensor | None,
        counts: Tensor | int,
    ) -> list[SequenceResult]:  # fmt: skip
        """Run one layer in its one or two directions."""
        part = slice(layer * self.num_directions, (layer + 1) * self.num_directions)
        suffixes = self._suffixes()[part]
        cells = zip(suffixes, starts[part], (False, True))
        calls = [self._call(suffix, x, start, lengths, resets, reverse) for suffix, start, reverse in cells]
        results = functional.run_directions(calls, self.backend)
        for suffix, result in zip(suffixes, results):
            self._observe(suffix, result.moments, counts)
        return results

    def _call(
        self, suffix: str, x: Tensor, start: Start, lengths: Tensor | None, resets: Tensor | None,
        reverse: bool = False,
    ) -> Recurrence:  # fmt: skip
        """Describe one cell's run over the sequence and draw its masks."""
        zoneout, mask = self._zoneout(x.shape[0], x.shape[1], x), self._draw_recurrent_mask(x.shape[1], x)
        return self._recurrence(
            suffix, x, start.state, lengths=lengths, resets=resets, reverse=reverse, zoneout=zoneout,
            recurrent_mask=mask, reset_state=start.reset_state,
        )  # fmt: skip

    def _valid_counts(self, x: Tensor, lengths: Tensor | None) -> Tensor | int:
        """Return the number of cases in each step's batch statistics."""
        if self.norm != "batch" or lengths is None:
            return x.shape[1]
        return (torch.arange(x.shape[0], device=x.device).unsqueeze(1) < lengths).sum(1)

    def _lengths(self, lengths: Any, x: Tensor) -> Tensor | None:
        """Return the lengths, checked, as a tensor on the input's device.

        The values are read here only, before the copy, so that lengths on the CPU cause no GPU synchronisation.
        """
        if lengths is None:
            return None
        checked = lengths if isinstance(lengths, Tensor) else torch.as_tensor(lengths)
        check_lengths(checked, x.shape[0], x.shape[1])
        return _copied_to(checked, x.device)

    def _starts(self, hx: Any, resets: Tensor | None, reset_state: Any, x: Tensor, rank: int) -> list[Start]:
        """Return the initial state and the reset state of each cell."""
        states = self._states(hx, x, rank)
        after = [(None, None)] * len(states) if resets is None else self._states(reset_state, x, rank, "reset_state")
        return [*map(Start, states, after)]

    def _states(self, hx: Any, x: Tensor, rank: int, name: str = "hx") -> list[GivenState]:
        """Return the initial state of each cell, from ``hx`` (rank 3, or 2 for unbatched input) or the default."""
        cells = self._suffixes()
        if hx is None:
            return [self._default_state(suffix, x.shape[1]) for suffix in cells]
        state = self._check_hx(hx, x, rank, name)
        if rank == 2:
            state = tuple(s.unsqueeze(1) for s in state)
        return [tuple(s[index] for s in state) for index in range(len(cells))]

    def _check_hx(self, hx: Any, x: Tensor, rank: int, argument: str = "hx") -> State:
        states = tuple(hx) if isinstance(hx, (tuple, list)) else (hx,)
        name = type(self).__name__
        expected = " and ".join(["h_0", "c_0"][: STATES[self.cell]])
        if len(states) != STATES[self.cell] or not all(isinstance(s, Tensor) for s in states):
            rule = f"{name} takes {expected} as {argument}"
            raise fail(rule, describe(hx), f"Pass {argument}={expected}, or None for the initial state.")
        for label, state, width in zip(("h_0", "c_0"), states, self.state_sizes):
            shape = [len(self._suffixes()), x.shape[1], width] if rank == 3 else [len(self._suffixes()), width]
            if list(state.shape) != shape:
                rule = f"{name} needs {label} of shape {shape} for this {'batched' if rank == 3 else 'unbatched'} input"
                remedy = "The axes are num_layers * num_directions, batch, size; batch_first does not change them."
                raise fail(rule, describe(state), remedy)
        return states

    def _check_input(self, input: Any) -> None:
        name, size = f"{type(self).__name__}(input_size={self.input_size})", self.input_size
        if not isinstance(input, Tensor):
            raise TypeError(f"{name} takes a Tensor or a PackedSequence, got {describe(input)}. Convert it first.")
        if input.dim() not in (2, 3):
            raise fail(f"{name} needs a 3-D input, or 2-D for one case", describe(input), "Add or remove axes.")
        if input.shape[-1] != size:
            width = input.shape[-1]
            remedy = f"Build {type(self).__name__}({width}, ...) if {width} is the right size."
            raise fail(f"{name} needs an input whose last axis is {size}", describe(input), remedy)

    def _check_packed(self, packed: PackedSequence, lengths: Any) -> None:
        self._check_input(packed.data)
        if lengths is not None:
            raise fail("a PackedSequence has its own lengths", "lengths= as well", "Drop lengths=.")
        if not readable(packed.batch_sizes):
            return
        total = int(packed.batch_sizes.sum())
        if packed.data.dim() != 2 or packed.data.shape[0] != total:
            rule = "the batch_sizes of a PackedSequence must sum to the rows of its data"
            remedy = "Build it with pack_padded_sequence or pack_sequence."
            raise fail(rule, f"a sum of {total} and data {describe(packed.data)}", remedy)


def _copied_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor`` on ``device``, without synchronising where that is safe.

    The driver has read pageable memory when the copy call returns. It may read pinned memory later, after the owner
    has overwritten it, so copies from pinned memory synchronise.
    """
    if tensor.device == device or torch.compiler.is_compiling():
        return tensor.to(device)
    return tensor.to(device, non_blocking=tensor.device.type == "cpu" and not tensor.is_pinned())


def _check_dropout(dropout: object, num_layers: int) -> float:
    rate = probability("dropout", dropout)
    if rate > 0 and num_layers == 1:
        warnings.warn(
            "dropout acts between recurrent layers, so a non-zero dropout expects num_layers greater than 1, "
            f"but got dropout={dropout} and num_layers={num_layers}",
            stacklevel=notices.callers_level(),
        )
    return rate


def _check_projection(cell: str, proj_size: int, hidden_size: int) -> None:
    if isinstance(proj_size, bool) or not isinstance(proj_size, int) or proj_size < 0:
        raise fail("proj_size must be a whole number, 0 for none", f"proj_size={show(proj_size)}", "Pass 0.")
    if proj_size and cell != "LSTM":
        raise fail("proj_size is for LSTM only", f"proj_size={proj_size} for {cell}", "Drop it or use LSTM.")
    if proj_size and proj_size >= hidden_size:
        rule = "proj_size must be smaller than hidden_size"
        raise fail(rule, f"proj_size={proj_size}, hidden_size={hidden_size}", "Lower proj_size.")


@with_options
class RNN(RecurrentLayer):
    """Layer-normalised Elman RNN, a drop-in replacement for ``torch.nn.RNN``.

    h_t = f(g/sigma (a_t - mu) + b), a_t = W_ih x_t + W_hh h_{t-1} (Eq. 4), f = tanh or relu.

    Positional arguments are those of ``torch.nn.RNN``.
    """

    cell = "RNN"

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, nonlinearity: str = "tanh", bias: bool = True,
        batch_first: bool = False, dropout: float = 0.0, bidirectional: bool = False, device: Any = None,
        dtype: Any = None,
        *, norm: str | None = "layer", placement: str | None = None, eps: float = 1e-5, eps_mode: str = "var",
        gain_init: float | None = None, forget_bias: float | None = None, zoneout: float | tuple[float, float] = 0.0,
        recurrent_dropout: float = 0.0, learn_initial_state: bool = False, backend: str = "auto",
        recompute: bool = False, momentum: float | None = 0.1, eval_statistics: str = "population",
        max_steps: int | None = None,
        proj_size: int = 0,  # refused unless 0, as torch.nn does
    ) -> None:  # fmt: skip
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, proj_size,
            device, dtype, **vars(Options.of(locals())),
        )  # fmt: skip
        one_of("nonlinearity", nonlinearity, ("tanh", "relu"))
        self.nonlinearity = nonlinearity


@with_options
class GRU(RecurrentLayer):
    """Layer-normalised GRU, drop-in for ``torch.nn.GRU``.

    Placement "paper" (default), gates r, z, n in torch's order:
    [r z] = LN(W_ih x) + LN(W_hh h') over 2H; n = tanh(LN(W_in x) + s(r) LN(W_hn h')); h = (1-s(z)) n + s(z) h'.
    Others: "split" (Haste), "joint" (Dreamer); see ``lamina.placements``.

    Positional arguments are those of ``torch.nn.GRU``.
    """

    cell = "GRU"

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True, batch_first: bool = False,
        dropout: float = 0.0, bidirectional: bool = False, device: Any = None, dtype: Any = None,
        *, norm: str | None = "layer", placement: str | None = None, eps: float = 1e-5, eps_mode: str = "var",
        gain_init: float | None = None, forget_bias: float | None = None, zoneout: float | tuple[float, float] = 0.0,
        recurrent_dropout: float = 0.0, learn_initial_state: bool = False, backend: str = "auto",
        recompute: bool = False, momentum: float | None = 0.1, eval_statistics: str = "population",
        max_steps: int | None = None,
        proj_size: int = 0,  # refused unless 0, as torch.nn does
    ) -> None:  # fmt: skip
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, proj_size,
            device, dtype, **vars(Options.of(locals())),
        )  # fmt: skip


@with_options
class LSTM(RecurrentLayer):
    """Layer-normalised LSTM, drop-in for ``torch.nn.LSTM``.

    Placement "paper" (default), gates i, f, g, o in torch's order:
    [i f g o] = LN(W_ih x) + LN(W_hh h') + b; c = s(f) c' + s(i) tanh(g); h = s(o) tanh(LN(c)), c carried raw.
    Others: "cell" (DRAW), "carry" (fastrnns, TF Addons), "joint" (torchaudio), "gate" (TF contrib); see
    ``lamina.placements``.

    Positional arguments are those of ``torch.nn.LSTM``.

    >>> lstm = LSTM(3, 5)
    >>> output, (h_n, c_n) = lstm(torch.zeros(7, 2, 3), lengths=[7, 4])
    >>> output.shape, h_n.shape
    (torch.Size([7, 2, 5]), torch.Size([1, 2, 5]))
    """

    cell = "LSTM"
