"""The CPU benchmark: its shapes, its tables, and runs that are stopped. Times are made up."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
DRAWN = (3, 150, 44, 442)


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.fixture
def plan():
    return importlib.import_module("cpu_plan")


@pytest.fixture
def timing():
    return importlib.import_module("cpu_timing")


@pytest.fixture
def cpu_tables():
    return importlib.import_module("cpu_tables")


@pytest.fixture
def speed_cpu():
    return importlib.import_module("speed_cpu")


# The plan


def test_drawn_shapes_come_from_the_seed(plan):
    shapes = plan.drawn_shapes(20)
    assert shapes == plan.drawn_shapes(20, plan.SEED) != plan.drawn_shapes(20, plan.SEED + 1)
    assert shapes[0] == DRAWN
    assert shapes[:7] == plan.drawn_shapes(7)
    assert len({*shapes, *plan.LISTED}) == 20 + 14
    for shape in plan.drawn_shapes(300):
        assert all(low <= size <= high for size, (low, high) in zip(shape, plan.RANGES))
        assert 24 * shape[0] * shape[1] * shape[3] * (shape[2] + shape[3]) <= 60e9


def test_the_whole_takes_less_than_25_minutes(speed_cpu):
    given = speed_cpu.arguments().parse_args([])
    plan = speed_cpu.plan_of(given)
    assert (plan.processes, plan.threads, len(plan.shapes)) == (3, (1, 2), 34)
    assert plan.seconds() < 25 * 60
    layers = [case for case in plan.cases() if case["measure"] == "layer"]
    assert len(layers) == 3 * 2 * (34 + 34 + 6)
    assert len(plan.cases()) - len(layers) == 3 + 3 + 18 + 3  # streams, cells, memory, first calls


def test_the_quick_plan_takes_less_than_a_minute(speed_cpu, capsys):
    assert speed_cpu.main(["--quick", "--plan"]) == 0
    assert "Layers: 8 cases" in capsys.readouterr().out
    parser = speed_cpu.arguments()
    parser.set_defaults(**speed_cpu.QUICK)
    plan = speed_cpu.plan_of(parser.parse_args(["--quick"]))
    assert plan.seconds() < 40
    assert [{*case} for case in plan.cases()] == [{"measure", "process", "threads", "cell", "shape"}] * 8
    assert {(case["cell"], case["threads"]) for case in plan.cases()} == {("LSTM", 1)}


def test_who_competes_depends_on_the_shape(plan):
    assert plan.contenders(DRAWN) == [plan.OURS, plan.TORCH]
    assert plan.contenders((64, 120, 64, 64)) == [plan.OURS, plan.TORCH, plan.PLAIN, plan.PADDED, plan.BATCH]
    assert plan.contenders((1, 100, 128, 128))[2:] == [plan.PLAIN, plan.PADDED, plan.EAGER]  # one case: no batch norm
    assert plan.EAGER not in plan.contenders((1, 100, 128, 128), loops=False)


# Timing


@pytest.mark.parametrize("batch", [1, 2, 7, 64])
def test_half_of_the_steps_are_padding(timing, batch):
    lengths = timing.half_lengths(20, batch)
    assert len(lengths) == batch
    assert 1 <= lengths.min() <= lengths.max() <= 19
    assert lengths.sum() == 10 * batch


@pytest.mark.slow
def test_every_contender_is_checked_and_timed(plan, timing, monkeypatch):
    monkeypatch.setattr(timing, "PEAK_SIZES", ((8, 8, 8),))
    monkeypatch.setattr(timing, "SHORTEST", 0.0)
    monkeypatch.setattr(timing, "_peaks", {})
    names = [plan.OURS, plan.TORCH, plan.PLAIN, plan.PADDED, plan.BATCH, plan.EAGER]
    threads = torch.get_num_threads()
    try:
        row = timing.measure_layer(1, "RNN", (4, 3, 5, 6), names, 2)
    finally:
        torch.set_num_threads(threads)
    assert {*row["errors"]} == {plan.OURS, plan.PLAIN, plan.PADDED, plan.BATCH}
    assert {*row["milliseconds"]} == {f"{kind}: {name}" for kind in plan.KINDS for name in names}
    assert all(len(times) == 2 and min(times) > 0 for times in row["milliseconds"].values())
    assert row["peak"]["gflops"] > 0
    assert row["peak"]["product"].endswith(", 8 x 8 x 8")
    json.dumps(row)


@pytest.mark.parametrize("pair", [(1e-4, 1e-6), (0.9, 0.9), (float("nan"), 1e-6)])
def test_a_wrong_result_is_not_timed(timing, monkeypatch, pair):
    monkeypatch.setattr(timing, "errors", lambda *case: pair)
    with pytest.raises(RuntimeError, match="not timed"):
        timing.checked("LSTM", (2, 3, 4, 5), "LN")


def test_a_padded_call_is_compared_with_the_reference_on_the_same_lengths(plan, timing):
    ours, reference = timing.errors("GRU", (4, 9, 5, 6), plan.PADDED)
    assert max(ours, reference) < 1e-5


def test_long_steps_need_no_warm_up(timing, monkeypatch):
    monkeypatch.setattr(timing, "seconds_of", lambda step, repeats: step(repeats) or 0.0105)
    for length, calls in (({"LONG": 0.1}, [1, 0, 2, 0, 2]), ({"LONG": 0.01}, [1, 2, 2])):
        monkeypatch.setattr(timing, "LONG", length["LONG"])
        seen = []
        times = timing.timed({"a": lambda repeats=0, seen=seen: seen.append(repeats)}, 2)
        assert (seen[1:], times) == (calls, {"a": [10.5, 10.5]})


def test_a_peak_is_the_best_of_all_measurements(timing, monkeypatch):
    seconds = {("slow", 8): 4.0, ("fast", 8): 2.0, ("slow", 16): 64.0, ("fast", 16): 32.0}
    timed = []

    def best_seconds(product):
        timed.append(product)
        return seconds[product]

    monkeypatch.setattr(timing, "PEAK_SIZES", ((8, 8, 8), (16, 16, 16)))
    monkeypatch.setattr(timing, "products", lambda rows, *_: {name: (name, rows) for name in ("slow", "fast")})
    monkeypatch.setattr(timing, "_best_seconds", best_seconds)
    monkeypatch.setattr(timing, "_peaks", {})
    monkeypatch.setattr(timing.torch, "set_num_threads", lambda threads: None)
    peak = {"gflops": 5.12e-07, "product": "fast, 8 x 8 x 8"}
    assert timing.matrix_peak(1) == peak
    assert len(timed) == 4
    seconds["fast", 8] = 3.0  # others use the machine: what was seen before stays
    assert timing.matrix_peak(1) == peak
    assert timed[4:] == [("fast", 8)]
    seconds["fast", 8] = 1.0
    assert timing.matrix_peak(1) == {**peak, "gflops": 1.024e-06}


# Tables


def layer(shape, process=1, cell="LSTM", threads=1, gflops=100.0, **training):
    """A row of one process: training takes ours 3 ms and torch.nn 6 ms unless told otherwise, inference a third."""
    times = {"LN": 3.0, "torch.nn plain": 6.0, **training}
    milliseconds = {f"training: {name}": [value] for name, value in times.items()}
    milliseconds |= {f"inference: {name}": [value / 3] for name, value in times.items()}
    case = {"measure": "layer", "process": process, "threads": threads, "cell": cell, "shape": list(shape)}
    return {**case, "milliseconds": milliseconds, "peak": {"gflops": gflops, "product": "a product"}}


def table(tables, words):
    """The table whose caption has these words."""
    return next(one for one in tables if words in one["caption"])


def test_a_ratio_is_the_median_of_the_processes(cpu_tables):
    rows = [layer(DRAWN, process, LN=ours) for process, ours in ((1, 3.0), (2, 9.0), (3, 6.0))]
    rows[2]["milliseconds"]["training: LN"] = [1.0, 4.5, 99.0]
    (row,) = cpu_tables.merged(rows)
    assert (row["shape"], row["training: LN"], row["training_ratio_to_torch"]) == (DRAWN, 4.5, 0.75)
    assert "training_ratio_to_no_norm" not in row


def test_the_share_is_of_the_best_peak_of_the_process(cpu_tables):
    rows = [layer((10, 100, 100, 100)), layer(DRAWN, gflops=200.0), layer((10, 100, 100, 100), threads=2)]
    shares = [row["training_share: LN"] for row in cpu_tables.merged(rows) if row["shape"] != DRAWN]
    rate = 24 * 10 * 100 * 100 * 200 / 3e-3 / 1e9
    assert shares == pytest.approx([rate / 200, rate / 100])


def test_listed_and_drawn_shapes_are_summed_up_apart_and_together(cpu_tables):
    shapes = ((1, 100, 128, 128), (8, 300, 128, 128), DRAWN)
    rows = [layer(shape, LN=ours) for shape, ours in zip(shapes, (3.0, 12.0, 6.0))]
    rows.append(layer(shapes[0], cell="RNN", threads=2))
    summary = cpu_tables.tables(rows)[0]
    assert summary["columns"][2:5] == ["inference: geometric mean", "inference: best", "inference: worst"]
    assert summary["rows"] == [
        ["LSTM, 1 thread", "listed (2)", *["1.00", "0.50", "2.00"] * 2],
        ["LSTM, 1 thread", "drawn (1)", *["1.00"] * 6],
        ["LSTM, 1 thread", "all (3)", *["1.00", "0.50", "2.00"] * 2],
        ["RNN, 2 threads", "listed (1)", *["0.50"] * 6],
    ]


def test_batch_norm_and_padding_are_shown_beside_their_limits(cpu_tables):
    rows = [layer((8, 300, 128, 128), **{"batch norm": 4.5, "LN, half padding": 1.5, "no norm": 2.0}), layer(DRAWN)]
    tables = cpu_tables.tables(rows)
    lines = table(tables, "against each other")["rows"]
    assert [(line[1], line[2], line[3], line[-1]) for line in lines] == [
        ("layer norm / no norm", "1", "1.50", "-"),
        ("batch norm / layer norm", "1", "1.50", "1.5"),
        ("half padding / no padding", "1", "0.50", "0.6"),
    ]
    (line,) = table(tables, "Other norms")["rows"]
    assert line == ["LSTM, 1 thread", "8, 300, 128, 128", *["1.50", "1.50", "0.50", "-"] * 2]


def everything(processes=1):
    """Rows of every kind."""
    extras = {"batch norm": 4.5, "LN, half padding": 1.5, "LN, step by step": 9.0}
    rows = [layer((1, 100, 128, 128), p, cell, **extras) for p in range(1, processes + 1) for cell in ("GRU", "LSTM")]
    frames = {str(n): {"stream": 8.0, "cell": 32.0, "difference": 0.0} for n in (128, 1024)}
    loops = {f"{cell} 64": {"LN": 3.0, "lamina.loop": 2.0, "torch.nn plain": 4.0} for cell in ("LSTM", "GRU")}
    memory = {"measure": "memory", "shape": [1, 2, 3, 4], "LN": 2.0, "torch.nn plain": 4.0, "ratio": 0.5}
    return [
        *rows,
        {"measure": "stream", "process": 1, "microseconds": frames},
        {"measure": "cells", "process": 1, "milliseconds": loops},
        *({**memory, "cell": cell} for cell in ("LSTM", "GRU")),
        *({"measure": "first call", "number": n, "cold": 6.0, "warm": 0.2} for n in (1, 2)),
    ]


def test_the_tables_show_every_row_as_text(cpu_tables):
    tables = cpu_tables.tables(everything(2))
    for one in tables:
        assert all(len(line) == len(one["columns"]) for line in one["rows"])
        assert all(isinstance(cell, str) for line in one["rows"] for cell in line)
    assert [len(one["rows"]) for one in tables] == [2, 6, 2, 2, 2, 2, 2, 2, 2]
    assert table(tables, "One frame")["rows"][0] == ["128", "8.0", "32.0", "0"]
    assert table(tables, "loop over a cell")["rows"][0] == ["LSTM 64", "4.00", "3.00", "2.00", "0.75", "0.50"]
    assert table(tables, "milliseconds")["rows"][0][2:4] == ["1 / 2", "0.50"]


def test_tables_of_a_stopped_run_show_what_is_there(cpu_tables):
    rows = everything()
    for end in range(1, len(rows) + 1):
        assert cpu_tables.tables(rows[:end])
    assert len(cpu_tables.tables([layer(DRAWN)])) == 3


def test_readme_reads_old_and_new_records(cpu_tables):
    machine = {"gpu": None, "cpu": "AMD", "cores": 2}
    made = {"machine": machine, "versions": {"torch": "2"}, "commit": "0123456789abcdef"}
    text = cpu_tables.readme({"rows": everything(3), "environment": made})
    assert "| GRU, 1 thread | 0.50 to 0.50, mean 0.50 | 0.50 to 0.50, mean 0.50 |" in text
    assert "Batch norm takes 1.50 to 1.50 of layer norm's time. If half of the steps are padding, a call takes" in text
    assert "8.0 microseconds for an LSTM of 128 units, 4.0 times as fast" in text
    assert "takes 0.75 to 0.75 of the time with PyTorch's cell, through `lamina.loop` 0.50 to 0.50." in text
    assert text.endswith("AMD, 2 cores, torch 2, commit 0123456789ab.")
    record = json.loads((ROOT / "results" / "bench-cpu.json").read_text())
    assert "commit" in cpu_tables.readme(record)


# Runs


class Process:
    """A measuring process that remembers what it was asked and dies when it is told to."""

    def __init__(self, log, dies_at=None):
        self.log, self.dies_at, self.dead = log, dies_at, False
        log.append("start")

    def ask(self, function, *arguments):
        self.log.append((function, *arguments))
        if self.dies_at == arguments:
            self.dead = True
            raise RuntimeError("the measuring process ended")
        return {"asked": function}

    def ended(self):
        return self.dead

    def end(self):
        self.log.append("end")


def test_cases_of_one_process_share_one(plan, speed_cpu, monkeypatch):
    log = []
    monkeypatch.setitem(speed_cpu.ALONE, "first call", lambda number: log.append(number) or {})
    monkeypatch.setitem(speed_cpu.ALONE, "memory", lambda cell, shape: {})
    small = plan.Plan(cells=("RNN",), threads=(1, 2), processes=2, rounds=7, shapes=((1, 100, 128, 128), DRAWN))
    measuring = speed_cpu.Measuring(small, lambda: Process(log))
    for case in small.cases():
        measuring(**case)
    names = [plan.OURS, plan.TORCH, plan.PLAIN, plan.PADDED, plan.EAGER]
    layers = [("layer", threads, "RNN", [1, 100, 128, 128], names, 7) for threads in (1, 2)]
    assert log == [*["start", *layers, ("stream", 7), ("cells", 7), "end"] * 2, 1, 2]


def test_a_measuring_process_that_died_is_replaced(plan, speed_cpu):
    log = []
    measuring = speed_cpu.Measuring(plan.Plan(rounds=7), lambda: Process(log, dies_at=(7,)))
    with pytest.raises(RuntimeError, match="ended"):
        measuring("stream", process=1)
    measuring("layer", process=1, threads=1, cell="LSTM", shape=list(DRAWN))
    measuring.end()
    measuring.end()
    assert [one if isinstance(one, str) else one[0] for one in log] == [
        *("start", "stream", "end"),
        *("start", "layer", "end"),
    ]


def test_the_measuring_process_answers_with_rows_and_errors(speed_cpu):
    process = speed_cpu.MeasuringProcess()
    with pytest.raises(RuntimeError, match=r"^KeyError: 'nothing'$"):
        process.ask("nothing")
    assert not process.ended()
    process.process.stdin.close()  # as when its parent dies
    assert process.process.wait(20) == 0
    assert process.ended()
    process.process.stdout.close()


@pytest.fixture
def run(speed_cpu, tmp_path, monkeypatch, capsys):
    """Run the command with made-up measurements, of which one may be interrupted: status, cases, record, output."""
    monkeypatch.setattr(speed_cpu.signal, "signal", lambda *pair: None)
    out = tmp_path / "deep" / "bench.json"

    def run(*words, interrupted=None):
        seen = []

        def ask(self, measure, process, threads, cell, shape):
            seen.append(shape)
            if len(seen) == interrupted:
                raise KeyboardInterrupt
            return {k: v for k, v in layer(shape).items() if k in ("milliseconds", "peak")}

        monkeypatch.setattr(speed_cpu.Measuring, "__call__", ask)
        status = speed_cpu.main([*words, "--out", str(out)])
        return status, seen, json.loads(out.read_text()), capsys.readouterr().out

    return run


def test_a_run_that_was_stopped_goes_on(run, plan):
    status, seen, record, text = run("--quick", interrupted=3)
    assert (status, len(seen), record["left"], len(record["rows"])) == (75, 3, 6, 2)
    assert record["begun"] is None  # it did not die of this case
    assert table(record["tables"], "Not in this record")["rows"] == [["6 more", "not measured yet"]]
    assert "2 of 8: LSTM, 1 thread" in text
    assert "6 cases are left" in text
    status, seen, record, text = run("--quick")
    assert (status, [tuple(shape) for shape in seen]) == (0, list(plan.QUICK_SHAPES[2:]))
    assert "already: 2 of 8 cases" in text
    assert [tuple(row["shape"]) for row in record["rows"]] == list(plan.QUICK_SHAPES)
    assert "left" not in record
    assert len(run("--quick")[1]) == 8  # a whole record is measured anew
    assert run("--quick", "--keep")[1] == []


def test_another_command_begins_anew(run):
    run("--quick", interrupted=3)
    status, seen, record, _ = run("--quick", "--rounds", "2")
    assert (status, len(seen), len(record["rows"])) == (0, 8, 8)
    assert record["command"] == "python benchmarks/speed.py --device cpu --quick --rounds 2"


def test_a_stopped_run_of_another_commit_begins_anew(run, tmp_path):
    _, _, record, _ = run("--quick", interrupted=3)
    record["environment"]["commit"] = "another"
    (tmp_path / "deep" / "bench.json").write_text(json.dumps(record))
    assert len(run("--quick")[1]) == 8
