"""Whole passes of short sequences as CUDA graphs.

A pass is some thirty operations of a few microseconds each; their launches cost the host 1 to 2 ms, which a short
sequence's own time does not hide. A kind of call (same sizes, same parameters, same stream) that comes a third time is
captured: from then on a pass is a copy in, one launch and a copy out. What a graph works on stays with it: a *space*,
leased by a forward pass and given back when nothing can ask for its backward pass any more. Lengths and restarts have
a place there as the input has.

Not captured: long or large problems, masks, what a stream's owner captures already, and, unless backend="triton" was
asked for, passes with lengths or resets: no GPU has measured those yet.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from . import replay, walk
from .forms import Setting
from .given import COUNT, EXTRAS
from .precision import Product, formed, tf32_wanted
from .switch import Switch

Given = Tensor | None
Backward = Callable[..., list[Given | Product]]

LONGEST = 160  # steps: beyond, the GPU's time hides the host's
# Of a device's memory, for W_x x and the matrix; a space has about eight times that. Beyond, the GPU's time hides the
# host's too: on an H200 float32 at B = 128, H = 2400 and bfloat16 at B = 16, H = 4096 take 3.6 and 5.3 ms, the host 2.
LARGEST = 1 / 1024
EAGER = 2  # calls of a kind before it is captured: they compile and load what is needed
KINDS = 256  # whose calls are counted
SPACES = 2  # of a kind: a training loop holds the last pass while it makes the next
ALL_SPACES = 16
ALL_MEMORY = 1 / 20  # of a device's, for all of them

SMALL = ("lengths", "resets")  # of what may act on a recurrence
ragged_eager = Switch()  # do not capture passes with lengths or resets in this thread
MATRIX = 6  # where the recurrent matrix stands in what a forward pass gives

_kinds: OrderedDict[Hashable, Kind] = OrderedDict()
_lock = threading.RLock()


def lease(
    setting: Setting, path: str, keep: str, tensors: Sequence[Given], extras: Sequence[Given], walker: ModuleType
) -> Lease | None:
    """Memory and graphs for this call, as ``walker`` walks it; None where it had better be launched as it is."""
    x, weight, matrix = tensors[0], tensors[3], tensors[4]
    if x is None or weight is None or matrix is None or not _may_be_captured(extras):
        return None
    share = _share(x, weight, matrix) * len(tensors) / COUNT
    if x.shape[0] > LONGEST or share > LARGEST or not _can_be_captured(x) or _saves_otherwise():
        return None
    key = (setting, path, keep, replay.stream_of(x), _multiplication(x.dtype), *map(_identity, (*tensors, *extras)))
    with _lock:
        kind = _kinds.get(key)
        if kind is None:
            kind = _kinds[key] = Kind(8 * share)
            while len(_kinds) > KINDS:
                _kinds.popitem(last=False)
        _kinds.move_to_end(key)
        found = kind.lease(setting, path, keep, tensors, extras, walker)
        _make_room(kind)
        return found


def _may_be_captured(extras: Sequence[Given]) -> bool:
    """Return whether a graph may take all extras. Masks are too large: they have the size of all steps' states."""
    allowed = () if ragged_eager else SMALL
    return all(e is None or EXTRAS[at % len(EXTRAS)] in allowed for at, e in enumerate(extras))


def _make_room(current: Kind) -> None:
    """Few spaces in all: those of the kinds that were not asked for longest go, and come back less readily."""
    for kind in _kinds.values():
        if _fit():
            return
        if kind is not current and kind.free:
            kind.made -= len(kind.free)
            kind.free, kind.calls, kind.eager = [], 0, 4 * kind.eager


def _fit() -> bool:
    made = [(kind.made, kind.made * kind.share) for kind in _kinds.values()]
    return sum(count for count, _ in made) <= ALL_SPACES and sum(share for _, share in made) <= ALL_MEMORY


def clear() -> None:
    """Give back what is kept, here and for loops of steps; a space that is leased goes when its lease ends."""
    with _lock:
        _kinds.clear()
    replay.clear()


def _can_be_captured(x: Tensor) -> bool:
    return x.is_cuda and replay.serves(x)


def _share(x: Tensor, weight: Tensor, matrix: Tensor) -> float:
    """What W_x x and the matrix take of the device's memory."""
    if not x.is_cuda:
        return 0.0
    numbers = x.shape[0] * x.shape[1] * weight.shape[0] + matrix.numel()
    return numbers * x.element_size() / float(torch.cuda.get_device_properties(x.device).total_memory)


def _saves_otherwise() -> bool:
    """Whether someone has a hand in what autograd saves (checkpoint, save_on_cpu): all calls must save alike then."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def _multiplication(dtype: torch.dtype) -> Hashable:
    return (replay.multiplication(dtype), dtype == torch.float32 and tf32_wanted())


def _stays(tensor: Tensor) -> bool:
    """Parameters stay where they are; inputs, states and matrices that autocast has cast are new in every call."""
    return isinstance(tensor, Parameter)


def _identity(tensor: Given) -> Hashable:
    """What a graph depends on: sizes, and of what stays where it lies, since graphs read it there."""
    if tensor is None:
        return None
    return (tensor.shape, tensor.dtype, tensor.data_ptr() if _stays(tensor) else 0, tensor.requires_grad)


class Kind:
    """Calls that one graph can serve."""

    def __init__(self, share: float) -> None:
        self.calls, self.made, self.eager = 0, 0, EAGER
        self.share = share  # of the device's memory, for one space
        self.free: list[Space] = []

    def lease(self, *call: Any) -> Lease | None:
        self.calls += 1
        if self.calls <= self.eager:
            return None
        if self.free:
            return Lease(self, self.free.pop())
        if self.made >= SPACES:
            return None
        self.made += 1
        try:
            with torch.inference_mode(False):  # what outlives a call must be of use in any mode
                return Lease(self, Space(*call))
        except RuntimeError as error:
            warnings.warn(f"passes are launched piece by piece: they could not be captured ({error})", stacklevel=2)
            self.made = SPACES
            return None


class Space:
    """Static tensors of one pass, and its graphs."""

    def __init__(
        self, setting: Setting, path: str, keep: str, tensors: Sequence[Given], extras: Sequence[Given],
        walker: ModuleType,
    ) -> None:  # fmt: skip
        self.call, self.walker = (setting, path), walker
        self.graphs: list[torch.cuda.CUDAGraph] = []
        # What is new in every call has a place here; parameters have not, so that a model's end is theirs.
        self.places = [None if t is None or _stays(t) else t.detach().clone() for t in tensors]
        self.extras = acting = [None if e is None else e.clone() for e in extras]
        self.device = next(t.device for t in tensors if t is not None)
        self.stream = replay.take_stream(self.device)
        self.found: list[Tensor] = []
        # Every forward pass makes anew what a backward pass has used up.
        given, kept = self.standing(tensors), walk.ONCE if keep == walk.ALL else keep
        self.used = False
        self.forward = self.captured(lambda: walker.forward(setting, path, given, acting, kept), self.found)
        self.own_matrix = self.found[MATRIX] is not given[4]
        if not self.own_matrix:  # without a norm it is the parameter itself
            self.found[MATRIX] = self.found[0]
        self.backwards: dict[Hashable, Backwards] = {}

    def __del__(self) -> None:
        # Graphs first: the end of one clears cuBLAS's workspace on its stream, whoever has that then (pytorch #193402).
        for graph in self.graphs:
            graph.reset()
        if hasattr(self, "stream"):
            replay.give_stream(self.device, self.stream)

    def standing(self, tensors: Sequence[Given]) -> list[Given]:
        """The tensors of a call, where graphs read them."""
        return [tensor if place is None else place for tensor, place in zip(tensors, self.places)]

    def captured(self, work: Callable[[], Sequence[Any]], found: list[Any]) -> torch.cuda.CUDAGraph:
        """What ``work`` launches, on memory of the graph's own; what it gives is to be ``found`` there."""
        graph = torch.cuda.CUDAGraph()
        self.graphs.append(graph)
        with torch.no_grad(), torch.cuda.stream(self.stream):
            graph.capture_begin(capture_error_mode="thread_local")  # other threads may do what they like
            try:
                found.extend(work())
            finally:
                graph.capture_end()
        return graph

    def walk(self, tensors: Sequence[Given], extras: Sequence[Given]) -> tuple[Tensor, Tensor, Tensor]:
        """The forward pass: outputs, final h and final c, the caller's own."""
        for place, tensor in zip((*self.places, *self.extras), (*tensors, *extras)):
            if place is not None and tensor is not None:
                place.copy_(tensor)
        self.forward.replay()
        self.used = False
        hist, h_n, c_n = self.found[:3]
        return self.walker.output(hist).clone(), h_n.clone(), c_n.clone()

    def walk_back(self, tensors: Sequence[Given], grads: Sequence[Given], needed: Sequence[bool]) -> list[Given]:
        """The backward pass of a call with these tensors: gradients, the caller's own."""
        given = self.standing(tensors)
        if self.used:  # a second backward pass of one forward pass
            self.forward.replay()
        self.used = True
        lies = (0 if t is None else t.data_ptr() for t in given)  # hooks may have brought a parameter elsewhere
        key = (*(None if g is None else g.dtype for g in grads), *needed, *lies)
        if key not in self.backwards:
            self.backwards[key] = Backwards(self, needed, self.walker.backward)
        return self.backwards[key].run(given, grads)


class Backwards:
    """The backward pass of a space for one pattern of gradients that arrive and are wanted."""

    def __init__(self, space: Space, needed: Sequence[bool], backward: Backward) -> None:
        kept = [space.found[0], *space.found[3:]]
        setting_and_path, extras, own_matrix = space.call, space.extras, space.own_matrix

        def work(tensors: Sequence[Given], grads: Sequence[Given]) -> list[Given | Product]:
            now = kept if own_matrix else [*kept[: MATRIX - 2], tensors[4], *kept[MATRIX - 1 :]]
            return backward(*setting_and_path, tensors, extras, now, grads, needed, once=True)

        self.work = work
        self.refused = False
        self.space = weakref.ref(space)  # which holds this
        self.graph: torch.cuda.CUDAGraph | None = None
        self.arriving: list[Given] = []
        self.found: list[Given | Product] = []
        self.calls = 0

    def run(self, tensors: Sequence[Given], grads: Sequence[Given]) -> list[Given]:
        """The first time launched as it is, which compiles and loads what is needed; captured the second time."""
        self.calls += 1
        space = self.space()
        if self.calls == 1 or space is None or self.refused or torch.cuda.is_current_stream_capturing():
            return list(map(formed, self.work(tensors, grads)))
        if self.graph is None and not self._capture(space, tensors, grads):
            return list(map(formed, self.work(tensors, grads)))
        for place, gradient in zip(self.arriving, grads):
            if place is not None and gradient is not None:
                place.copy_(gradient)
        if self.graph is not None:
            self.graph.replay()
        return _copies(self.found)

    def _capture(self, space: Space, tensors: Sequence[Given], grads: Sequence[Given]) -> bool:
        self.arriving = [None if g is None else g.contiguous().clone() for g in grads]
        try:
            self.graph = space.captured(lambda: self.work(tensors, self.arriving), self.found)
        except RuntimeError as error:
            warnings.warn(f"passes are launched piece by piece: they could not be captured ({error})", stacklevel=2)
            self.refused = True
        return not self.refused


def _copies(found: Sequence[Given | Product]) -> list[Given]:
    """Each gradient as the caller's own: products formed, the input's copied alone, the parameters' in one go."""
    first, rest = found[0], [t for t in found[1:] if isinstance(t, Tensor)]
    copied: list[Given] = [first.clone() if isinstance(first, Tensor) else None]
    together = len({t.dtype for t in rest}) == 1 and all(t.numel() * t.element_size() % 16 == 0 for t in rest)
    if together and len(rest) > 1:
        flat = torch.cat([t.reshape(-1) for t in rest])
        pieces = torch.split(flat, [t.numel() for t in rest])
        parts = iter([piece.view(t.shape) for piece, t in zip(pieces, rest)])
    else:
        parts = iter([t.clone() for t in rest])
    return copied + [next(parts) if isinstance(t, Tensor) else formed(t) for t in found[1:]]


class Lease:
    """A space for as long as this object lives."""

    def __init__(self, kind: Kind, space: Space) -> None:
        self.kind, self.space = kind, space

    def __del__(self) -> None:
        self.kind.free.append(self.space)
