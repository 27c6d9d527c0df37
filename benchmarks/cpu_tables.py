"""The CPU benchmark's record as people read it: its tables and the README's part."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

import growing
from cpu_plan import CELL_BATCH, CELL_STEPS, KINDS, LISTED, LOOP, OURS, RATIOS, TORCH, flops

Row = dict[str, Any]
Table = dict[str, Any]
LIMITS = {"batch_norm_to_layer_norm": 1.5, "half_padding_to_none": 0.6}  # what the project asks of our layers
RATIO_NAMES = {
    "ratio_to_no_norm": "layer norm / no norm",
    "batch_norm_to_layer_norm": "batch norm / layer norm",
    "half_padding_to_none": "half padding / no padding",
    "ratio_to_step_by_step": "layer norm / eager loop",
}
CELLS_CAPTION = (
    f"A training step of a loop over a cell: {CELL_STEPS} steps, {CELL_BATCH} cases, inputs = units, one thread, "
    "milliseconds"
)
SHAPE = "Batch, steps, inputs, units"


# One row for each case, from those of all processes


def rows_of(rows: Iterable[Row], measure: str) -> list[Row]:
    """Return the rows of one kind of measurement."""
    return [row for row in rows if row.get("measure", "layer") == measure]


def merged(rows: Iterable[Row]) -> list[Row]:
    """Return one row for each case of layers: medians of the processes' numbers."""
    layers, cases = rows_of(rows, "layer"), {}
    best = peaks(layers)
    for row in layers:
        peak = best.get((row["threads"], row.get("process")), {})
        cases.setdefault((row["threads"], row["cell"], tuple(row["shape"])), []).append(numbers_of(row, peak))
    return [
        {"threads": threads, "cell": cell, "shape": shape, **_medians(processes)}
        for (threads, cell, shape), processes in cases.items()
    ]


def peaks(layers: list[Row]) -> dict[tuple[int, int], Row]:
    """Return the machine's matrix peak by number of threads and process: the best that any case of it saw."""
    best: dict[tuple[int, int], Row] = {}
    for row in layers:
        if "peak" in row:
            key = row["threads"], row["process"]
            best[key] = max(best.get(key, row["peak"]), row["peak"], key=lambda peak: peak["gflops"])
    return best


def _medians(processes: list[dict[str, float]]) -> dict[str, float]:
    names = [name for name in processes[0] if all(name in one for one in processes)]
    return {name: statistics.median(one[name] for one in processes) for name in names}


def numbers_of(row: Row, peak: Row) -> dict[str, float]:
    """Return the medians over a process's rounds, their ratios, and the shares of the matrix peak."""
    numbers = {name: statistics.median(values) for name, values in row["milliseconds"].items()}
    for kind in KINDS:
        for label, (ours, theirs) in RATIOS.items():
            if {f"{kind}: {ours}", f"{kind}: {theirs}"} <= numbers.keys():
                numbers[f"{kind}_{label}"] = numbers[f"{kind}: {ours}"] / numbers[f"{kind}: {theirs}"]
        operations = 1e-6 * flops(row["cell"], row["shape"], kind)
        for name in (OURS, TORCH):
            numbers[f"{kind}_share: {name}"] = operations / numbers[f"{kind}: {name}"] / peak["gflops"]
    return numbers


# Tables


def tables(rows: list[Row]) -> list[Table]:
    """Return all tables of what has been measured so far."""
    layers = merged(rows)
    parts: list[tuple[Callable[[list[Row]], Table], list[Row]]] = [
        (_summary, layers),
        (_norms_summary, [row for row in layers if _has_variants(row)]),
        (_rows_table, layers),
        (_variants_table, [row for row in layers if _has_variants(row)]),
        (_peak_table, rows_of(rows, "layer")),
        (_stream_table, rows_of(rows, "stream")),
        (_cells_table, rows_of(rows, "cells")),
        (_memory_table, rows_of(rows, "memory")),
        (_first_call_table, rows_of(rows, "first call")),
    ]
    return [table(some) for table, some in parts if some]


def _has_variants(row: Row) -> bool:
    return any(f"training_{label}" in row for label in RATIO_NAMES)


def case_name(cell: str, threads: int) -> str:
    return f"{cell}, {threads} thread{'s' if threads > 1 else ''}"


def _by_case(layers: list[Row]) -> dict[str, list[Row]]:
    """Group rows by cell and number of threads."""
    groups: dict[str, list[Row]] = {}
    for row in layers:
        groups.setdefault(case_name(row["cell"], row["threads"]), []).append(row)
    return groups


def _spread(layers: list[Row], label: str) -> list[str]:
    """Return geometric mean, best and worst of a ratio, for inference and for training."""
    cells = []
    for kind in KINDS:
        ratios = [row[f"{kind}_{label}"] for row in layers]
        cells += [f"{ratio:.2f}" for ratio in (statistics.geometric_mean(ratios), min(ratios), max(ratios))]
    return cells


SPREAD = [f"{kind}: {name}" for kind in KINDS for name in ("geometric mean", "best", "worst")]


def _summary(layers: list[Row]) -> Table:
    lines = [
        [case, f"{shapes} ({len(some)})", *_spread(some, "ratio_to_torch")]
        for case, group in _by_case(layers).items()
        for shapes, some in _listed_and_drawn(group).items()
    ]
    caption = "Time of our layer with layer norm over that of torch.nn's without a norm"
    return {"caption": caption, "columns": ["", "shapes", *SPREAD], "rows": lines}


def _listed_and_drawn(layers: list[Row]) -> dict[str, list[Row]]:
    """Return listed and drawn shapes apart, and together where there are both."""
    listed = [row for row in layers if row["shape"] in LISTED]
    drawn = [row for row in layers if row["shape"] not in LISTED]
    groups = {"listed": listed, "drawn": drawn, "all": layers if listed and drawn else []}
    return {name: some for name, some in groups.items() if some}


def _norms_summary(layers: list[Row]) -> Table:
    lines = []
    for case, group in _by_case(layers).items():
        for label, name in RATIO_NAMES.items():
            if some := [row for row in group if f"training_{label}" in row]:
                limit = f"{LIMITS[label]:.1f}" if label in LIMITS else "-"
                lines.append([case, name, str(len(some)), *_spread(some, label), limit])
    caption = "Our layers against each other and against the eager loop: ratios of time on the listed shapes"
    return {"caption": caption, "columns": ["", "ratio", "shapes", *SPREAD, "must be at most"], "rows": lines}


def _rows_table(layers: list[Row]) -> Table:
    columns = ["", SHAPE]
    for kind in KINDS:
        columns += [f"{kind}, ms: LN / torch.nn", f"{kind}: ratio", f"{kind}, share of peak: LN / torch.nn"]
    caption = (
        "Each shape: milliseconds, the ratio of time, and the share of the machine's matrix peak that the products "
        "reach; * marks a drawn shape"
    )
    return {"caption": caption, "columns": columns, "rows": [row_cells(row) for row in layers]}


def row_cells(row: Row) -> list[str]:
    """Return one line of the table of rows."""
    cells = [case_name(row["cell"], row["threads"]), shape_name(row["shape"])]
    for kind in KINDS:
        times = [row.get(f"{kind}: {name}") for name in (OURS, TORCH)]
        shares = [row.get(f"{kind}_share: {name}") for name in (OURS, TORCH)]
        cells += [_pair(times, ".3g"), f"{row[f'{kind}_ratio_to_torch']:.2f}", _pair(shares, ".0%")]
    return cells


def shape_name(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape)) + (" *" if tuple(shape) not in LISTED else "")


def _pair(values: list[float | None], form: str) -> str:
    return " / ".join("-" if value is None else f"{value:{form}}" for value in values)


def _variants_table(layers: list[Row]) -> Table:
    columns = ["", SHAPE, *(f"{kind}: {name}" for kind in KINDS for name in RATIO_NAMES.values())]
    lines = []
    for row in layers:
        ratios = [row.get(f"{kind}_{label}") for kind in KINDS for label in RATIO_NAMES]
        cells = ["-" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        lines.append([case_name(row["cell"], row["threads"]), shape_name(row["shape"]), *cells])
    return {"caption": "Other norms, padding and the eager loop: ratios of time", "columns": columns, "rows": lines}


def _peak_table(layers: list[Row]) -> Table:
    lines = [
        [str(threads), str(process), f"{peak['gflops']:.0f}", peak["product"]]
        for (threads, process), peak in sorted(peaks(layers).items())
    ]
    caption = "The machine's matrix peak: the best rate of several products, in each measuring process"
    return {"caption": caption, "columns": ["threads", "process", "GFLOP/s", "product"], "rows": lines}


def _stream_table(streams: list[Row]) -> Table:
    frames = [row["microseconds"] for row in streams]
    lines = [
        [
            hidden,
            *(f"{middle(frames, hidden, name):.1f}" for name in ("stream", "cell")),
            f"{max(one[hidden]['difference'] for one in frames):.1g}",
        ]
        for hidden in frames[0]
    ]
    caption = (
        "One frame, one case, one thread, microseconds; the largest difference from the sequence call's outputs over "
        "300 frames"
    )
    return {"caption": caption, "columns": ["units", "stream", "nn.LSTMCell", "difference"], "rows": lines}


def _cells_table(cells: list[Row]) -> Table:
    times = [row["milliseconds"] for row in cells]
    lines = [
        [case, *(f"{middle(times, case, name):.2f}" for name in (TORCH, OURS, LOOP)), *_ratios_to_torch(times, case)]
        for case in times[0]
    ]
    columns = ["cell, units", TORCH, OURS, LOOP, "cell / torch", "loop / torch"]
    return {"caption": CELLS_CAPTION, "columns": columns, "rows": lines}


def _ratios_to_torch(times: list[Row], case: str) -> list[str]:
    """Return the medians over processes of our times over torch's: the cell's and the loop's."""
    return [f"{statistics.median(one[case][name] / one[case][TORCH] for one in times):.2f}" for name in (OURS, LOOP)]


def middle(frames: list[Row], hidden: str, name: str) -> float:
    """Return the median over processes of one number."""
    return statistics.median(one[hidden][name] for one in frames)


def _memory_table(memory: list[Row]) -> Table:
    lines = [
        [one["cell"], shape_name(one["shape"]), f"{one[OURS]:.1f}", f"{one[TORCH]:.1f}", f"{one['ratio']:.2f}"]
        for one in memory
    ]
    caption = "Peak memory of a training step over what the process had before, megabytes"
    return {"caption": caption, "columns": ["", SHAPE, OURS, TORCH, "ratio"], "rows": lines}


def _first_call_table(calls: list[Row]) -> Table:
    lines = [[kind, f"{statistics.median(call[kind] for call in calls):.2f}"] for kind in ("cold", "warm")]
    caption = "An LSTM's first training step in a process, seconds"
    return {"caption": caption, "columns": ["compiled code", "seconds"], "rows": lines}


# The README's part


def readme(record: Row) -> str:
    """Return the README's table and the sentences below it."""
    layers, lines = merged(record["rows"]), []
    for case, group in _by_case(sorted(layers, key=_cell_then_threads(layers))).items():
        cells = []
        for kind in KINDS:
            ratios = [row[f"{kind}_ratio_to_torch"] for row in group]
            cells.append(f"{min(ratios):.2f} to {max(ratios):.2f}, mean {statistics.geometric_mean(ratios):.2f}")
        lines.append([case, *cells])
    table = [["time over that of `torch.nn`, no norm", "inference", "training"], ["---"] * 3, *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in table) + "\n\n" + _sentences(record, layers)


def _cell_then_threads(layers: list[Row]) -> Callable[[Row], tuple[int, int]]:
    cells = list(dict.fromkeys(row["cell"] for row in layers))
    return lambda row: (cells.index(row["cell"]), row["threads"])


def _sentences(record: Row, layers: list[Row]) -> str:
    frames, calls = _frames(record), _calls(record)
    loops, small = (_speedups(rows) for rows in (layers, [row for row in layers if row["shape"] == (1, 100, 128, 128)]))
    stream, cell = middle(frames, "128", "stream"), middle(frames, "128", "cell")
    return (
        f"Against the same layer step by step {min(loops):.1f} to {max(loops):.0f} times as fast, at least "
        f"{min(small):.1f} times for one case of 128 units. {_norms_in_words(layers)}`lamina.stream(layer)` takes one "
        f"frame at a time: {stream:.1f} microseconds for an LSTM of 128 units, {cell / stream:.1f} times as fast as "
        f"`nn.LSTMCell`, with the sequence call's numbers bit for bit. {_cells_in_words(record)}A training step's peak "
        f"memory is {_memory_in_words(record)}. The very first step takes {statistics.median(calls['cold']):.1f} "
        f"seconds to compile, the first of later processes {statistics.median(calls['warm']):.2f}. All of this: "
        f"{growing.source(record)}."
    )


def _speedups(layers: list[Row]) -> list[float]:
    """Return how many times faster than the eager loop our layers are."""
    names = [f"{kind}_ratio_to_step_by_step" for kind in KINDS]
    return [1 / row[name] for row in layers for name in names if name in row]


def _norms_in_words(layers: list[Row]) -> str:
    sentences = ""
    for label, words in (
        ("batch_norm_to_layer_norm", "Batch norm takes {0:.2f} to {1:.2f} of layer norm's time. "),
        ("half_padding_to_none", "If half of the steps are padding, a call takes {0:.2f} to {1:.2f} of its time. "),
    ):
        ratios = [row[f"{kind}_{label}"] for row in layers for kind in KINDS if f"{kind}_{label}" in row]
        sentences += words.format(min(ratios), max(ratios)) if ratios else ""
    return sentences


def _cells_in_words(record: Row) -> str:
    """Return a sentence on loops over cells, where the record has them."""
    times = [row["milliseconds"] for row in rows_of(record["rows"], "cells")]
    ratios = [[float(ratio) for ratio in _ratios_to_torch(times, case)] for case in (times[0] if times else {})]
    if not ratios:
        return ""
    cells, loops = ([f"{end(side):.2f}" for end in (min, max)] for side in zip(*ratios))
    return (
        f"A training step of a loop over a cell takes {' to '.join(cells)} of the time with PyTorch's cell, through "
        f"`lamina.loop` {' to '.join(loops)}. "
    )


def _frames(record: Row) -> list[Row]:
    return [row["microseconds"] for row in rows_of(record["rows"], "stream")]


def _calls(record: Row) -> dict[str, list[float]]:
    calls = rows_of(record["rows"], "first call")
    return {kind: [call[kind] for call in calls] for kind in ("cold", "warm")}


def _memory_in_words(record: Row) -> str:
    """Return the range of peak memory over that of torch.nn, for each cell."""
    ranges, memory = [], rows_of(record["rows"], "memory")
    for cell in dict.fromkeys(one["cell"] for one in memory):
        peaks = [one["ratio"] for one in memory if one["cell"] == cell]
        ranges.append(f"{min(peaks):.2f} to {max(peaks):.2f} of `nn.{cell}`'s")
    return f"{', '.join(ranges[:-1])} and {ranges[-1]}"
