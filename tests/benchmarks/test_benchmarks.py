"""Benchmarks that are stopped, are killed or fail in a case: nothing is lost, nothing is measured twice."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
CASES = [{"cell": cell, "shape": [n, 3]} for cell in ("LSTM", "GRU") for n in (1, 2)]


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.fixture
def growing():
    return importlib.import_module("growing")


@pytest.fixture
def everything():
    return importlib.import_module("everything")


def tables(rows):
    return [{"caption": "all", "columns": ["n"], "rows": [[str(row["shape"][0])] for row in rows]}]


def given(out, **options):
    return argparse.Namespace(**{"out": str(out), "keep": True, "minutes": 9e9, **options})


def head(command="python benchmarks/speed.py"):
    return {"kind": "bench", "name": "x", "title": "x", "about": "", "command": command}


def measured(growing, out, measure=lambda **case: {"time": 1.0}, cases=CASES, **options):
    """The exit status, which cases were measured, and the record."""
    seen = []

    def one(**case):
        seen.append(case)
        return measure(**case)

    status = growing.Growing(given(out, **options), head(), tables).measure(cases, one, str)
    return status, seen, json.loads(out.read_text())


def test_what_a_record_has_is_not_measured_again(growing, tmp_path):
    out = tmp_path / "deep" / "bench.json"
    status, seen, _ = measured(growing, out, cases=CASES[2:])
    assert (status, seen) == (growing.DONE, CASES[2:])
    status, seen, record = measured(growing, out)
    assert (status, seen) == (growing.DONE, CASES[:2])
    assert [{k: row[k] for k in CASES[0]} for row in record["rows"]] == CASES  # in the order of cases, not of time
    assert record["tables"] == tables(CASES)
    assert not {"begun", "left"} & {*record}
    assert measured(growing, out, keep=False)[1] == CASES


def test_a_case_that_fails_is_noted_and_the_others_follow(growing, tmp_path, capsys):
    def measure(cell, shape):
        if (cell, shape[0]) == ("LSTM", 2):
            raise RuntimeError("error 0.5, reference 0.1: not timed\nand more")
        return {"time": 1.0}

    status, seen, record = measured(growing, tmp_path / "a.json", measure)
    assert (status, seen) == (growing.FAILED, CASES)
    why = "RuntimeError: error 0.5, reference 0.1: not timed"
    assert record["failed"] == [{"case": CASES[1], "why": why}]
    assert record["tables"][1]["rows"] == [["LSTM, [2, 3]", why]]
    assert "FAILED" in capsys.readouterr().out
    assert measured(growing, tmp_path / "a.json")[:2] == (growing.FAILED, [])  # known: not tried again


def test_no_case_begins_that_may_not_end_in_time(growing, tmp_path, monkeypatch):
    status, seen, record = measured(growing, tmp_path / "a.json", minutes=0.0)
    assert (status, seen, record["left"]) == (growing.LEFT, [], len(CASES))
    assert record["tables"] == [
        {"caption": "Not in this record", "columns": ["case", "why"], "rows": [["4 more", "not measured yet"]]}
    ]
    clock = iter(range(0, 10_000, 25))  # each look at the clock is 25 s after the one before: a case takes that long
    monkeypatch.setattr(growing.time, "monotonic", lambda: next(clock))
    status, seen, record = measured(growing, tmp_path / "b.json", minutes=140 / 60)
    assert (status, seen) == (growing.LEFT, CASES[:2])
    assert (record["left"], record["longest"], record["begun"]) == (2, 25, None)


def test_a_run_that_is_asked_to_stop_counts_nothing_as_failed(growing, tmp_path):
    def measure(cell, shape):
        if (cell, shape[0]) == ("LSTM", 2):
            raise KeyboardInterrupt
        return {"time": 1.0}

    for _ in range(growing.TRIES + 1):
        status, _, record = measured(growing, tmp_path / "a.json", measure)
        assert (status, record["left"], record["begun"], record["failed"]) == (growing.LEFT, 3, None, [])
    command = head()["command"]
    assert growing.stopped(tmp_path / "a.json", command)
    assert not growing.stopped(tmp_path / "a.json", f"{command} --rounds 9")
    assert not growing.stopped(tmp_path / "b.json", command)
    measured(growing, tmp_path / "a.json")
    assert not growing.stopped(tmp_path / "a.json", command)


def test_a_device_that_is_lost_ends_the_process(growing, tmp_path, monkeypatch):
    """After a bad access every call fails: the other cases are for the next process."""
    monkeypatch.setattr(growing, "_device_answers", lambda: False)

    def measure(**case):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    status, seen, record = measured(growing, tmp_path / "a.json", measure)
    assert (status, seen, len(record["failed"])) == (growing.LOST, CASES[:1], 1)
    monkeypatch.undo()
    assert measured(growing, tmp_path / "a.json")[:2] == (growing.FAILED, CASES[1:])


@pytest.mark.parametrize("name", ["commit", "machine", "dirty"])
def test_rows_of_other_code_are_not_kept(growing, tmp_path, name):
    out = tmp_path / "a.json"
    _, _, record = measured(growing, out)
    record["environment"][name] = "another"
    out.write_text(json.dumps(record))
    with pytest.raises(SystemExit, match=f"made with {name} another.*delete it and measure again"):
        measured(growing, out)
    assert measured(growing, out, keep=False)[1] == CASES


def test_rows_of_another_command_or_of_no_record(growing, tmp_path):
    out = tmp_path / "a.json"
    measured(growing, out)
    with pytest.raises(SystemExit, match="command"):
        growing.Growing(given(out), head("python benchmarks/speed.py --rounds 9"), tables)
    out.write_text('{"rows": [')
    with pytest.raises(SystemExit, match="is no record"):
        measured(growing, out)


def test_the_command_is_what_was_measured(growing):
    words = ["--op", "cell", "--keep", "--out", "x/y.json", "--minutes=9", "--workers", "0", "--rounds=3", "--compiled"]
    assert growing.command("speed.py", words) == "python benchmarks/speed.py --op cell --rounds=3 --compiled"


SCRIPT = """
    import argparse, json, os, signal, sys, time
    from pathlib import Path
    sys.path[:0] = [{root!r}, {root!r} + "/benchmarks"]
    if {gpu}:
        import torch  # without it a record does not name the GPU, and the session would not know it as its own
    import growing
    parser = argparse.ArgumentParser()
    growing.arguments(parser, "x.json", workers=0)
    given = parser.parse_args()
    log = Path(given.out).with_suffix(".log")
    def say(word):
        with log.open("a") as file:
            file.write(f"{{word}} {{time.monotonic()}}\\n")
    def measure(n):
        say(f"begin {{n}}")
        {body}
        say(f"end {{n}}")
        return {{"time": 1.0}}
    def touch(n):
        say(f"touch {{n}}")
        raise RuntimeError("told where it is measured")
    head = {{"kind": "bench", "name": "x", "title": "x", "about": "", "command": growing.command("x.py")}}
    cases = [{{"n": n}} for n in range(4)]
    sys.exit(growing.run(given, head, lambda rows: [], cases, measure, str, touch))
"""
KILLED = "if n == 2 and log.read_text().count('begin 2') <= {times}: os.kill(os.getpid(), signal.SIGKILL)"


def script(folder, body="pass", name="x.py"):
    place = folder / name
    place.write_text(textwrap.dedent(SCRIPT).format(root=str(ROOT), body=body, gpu=torch.cuda.is_available()))
    return place


def run(place, *words):
    return subprocess.run([sys.executable, place, *words], capture_output=True, text=True)


def said(place, word):
    return [int(line.split()[1]) for line in place.read_text().splitlines() if line.startswith(word)]


@pytest.mark.parametrize(("times", "statuses", "rows"), [(1, [-9, 0], 4), (2, [-9, -9, 1], 3)])
def test_a_killed_process_loses_nothing(tmp_path, times, statuses, rows):
    """The case it died of is tried once more; then it counts as failed."""
    place, out = script(tmp_path, KILLED.format(times=times)), tmp_path / "a.json"
    found = [run(place, "--keep", "--out", out).returncode for _ in statuses]
    record = json.loads(out.read_text())
    assert (found, len(record["rows"]), len(record["failed"])) == (statuses, rows, 4 - rows)
    assert said(tmp_path / "a.log", "end") == [0, 1, 2, 3] if rows == 4 else [0, 1, 3]
    assert not list(tmp_path.glob("*.part"))


def test_compiling_beforehand(tmp_path):
    place, out = script(tmp_path), tmp_path / "a.json"
    found = run(place, "--out", out, "--compile", "--workers", "3")
    assert (found.returncode, out.exists()) == (0, False), found.stderr
    assert sorted(said(tmp_path / "a.log", "touch")) == [0, 1, 2, 3]
    assert not said(tmp_path / "a.log", "begin")


def session(everything, folder, jobs, minutes=9e9):
    return everything.Session(folder / "out", minutes, jobs, root=folder)


def test_everything_goes_on_and_times_nothing_beside_others(everything, tmp_path):
    together = script(tmp_path, "time.sleep(0.05)", "together.py")
    timed = script(tmp_path, KILLED.format(times=1), "timed.py")
    jobs = (everything.Job("a", (together.name,), alone=False), everything.Job("b", (timed.name,)))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "b.json").write_text(json.dumps({"environment": {"commit": "other"}, "rows": [1]}))
    assert session(everything, tmp_path, jobs).run() == 0
    times = {}
    for name in ("a", "b"):
        lines = [line.split() for line in (tmp_path / "out" / f"{name}.log").read_text().splitlines()]
        times[name] = [(word, float(at)) for word, _, at in lines]
    assert [word for word, _ in times["b"]].count("touch") == 4  # by the job itself, while the other one works
    begun = min(at for word, at in times["b"] if word == "begin")
    assert begun > max(at for _, at in times["a"])
    assert said(tmp_path / "out" / "b.log", "end") == [0, 1, 2, 3]  # a process was killed on the way
    before = (tmp_path / "out" / "b.log").read_text()
    assert session(everything, tmp_path, jobs).run() == 0
    assert (tmp_path / "out" / "b.log").read_text() == before


def running():
    """The command lines of all processes."""
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # some end meanwhile
            yield place.read_bytes()


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="asks /proc what is running")
def test_everything_ends_in_time_with_all_it_started(everything, tmp_path, monkeypatch):
    monkeypatch.setattr(everything, "MARGIN", 0.2)
    child = "import subprocess; subprocess.run(['sleep', '321.5'])"
    jobs = (everything.Job("a", (script(tmp_path, child).name,), alone=False, grows=False),)
    began = time.monotonic()
    assert session(everything, tmp_path, jobs, minutes=4 / 60).run() == 75
    assert time.monotonic() - began < 20
    while any(b"321.5" in arguments for arguments in running()):  # it may take a moment to die
        assert time.monotonic() - began < 20


@pytest.mark.slow
def test_everything_knows_its_records(everything):
    found = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "everything.py", "--only", "bench-layer"], capture_output=True, text=True
    )
    assert found.returncode == 2
    assert "bench-layers" in found.stderr
    for job in everything.JOBS:
        assert (ROOT / "benchmarks" / job.words[0]).exists()
        command = [sys.executable, ROOT / "benchmarks" / job.words[0], *job.words[1:], "--help"]
        if job.grows:
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            assert all(word in text for word in ("--keep", "--minutes", "--workers", *["--compile"] * job.alone))


def test_verify_goes_on_after_the_last_whole_line(tmp_path):
    verify = importlib.import_module("verify")
    folder = verify.parts_of(tmp_path / "v.json", True, 3)
    with (folder / "0.json").open("a+") as file:
        file.write('{"a": 1}\n{"b": 2}\n{"c"')
        file.flush()
        assert verify._whole_lines(file) == 2
        file.write('{"c": 3}\n')
    assert (folder / "0.json").read_text() == '{"a": 1}\n{"b": 2}\n{"c": 3}\n'
    assert verify.parts_of(tmp_path / "v.json", True, 3) == folder
    assert (folder / "0.json").exists()
    for keep, workers in ((True, 4), (False, 4)):  # shares are cut by the number of workers
        (folder / "0.json").write_text("{}\n")
        verify.parts_of(tmp_path / "v.json", keep, workers)
        assert not (folder / "0.json").exists()
