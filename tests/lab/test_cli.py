"""The command line as a user meets it: help, mistakes, runs, signals, and what is left behind."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lamina.errors import InputError
from lamina.lab.cli import jobs as plan
from lamina.lab.cli import workers
from lamina.lab.cli.commands import main
from lamina.lab.experiment import Scale
from lamina.lab.experiments import SHEETS, find
from lamina.lab.experiments.mnist.settings import NORMS
from lamina.lab.options import Settings
from lamina.lab.reports import records
from lamina.lab.runs import folder as runs
from tests.lab import toy

SMALL = ["run", "mnist", "--data", "embedded", "--hidden", "8", "--epochs", "0.2", "--device", "cpu"]
LONG = ["run", "mnist", "--data", "embedded", "--hidden", "64", "--device", "cpu"]
LONG += ["--log-every", "1", "--eval-every", "5000", "--checkpoint-every", "100000"]
PYTHON = [sys.executable, "-m", "lamina"]
HOME = Path("mnist") / "mnist-embedded"  # of these runs, below --runs
COMMANDS = (
    "list",
    "run",
    "reproduce",
    "paper",
    "report",
    "evaluate",
    "search",
    "nearest",
    "tune",
    "data",
    "bench",
    "analyse",
    "info",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with a finished run of layer norm and one of none."""
    folder = tmp_path_factory.mktemp("finished")
    assert main([*SMALL, "--norm", "layer,none", "--jobs", "1", "--quiet", "--runs", str(folder)]) == 0
    return folder


def said(capsys, *words, code=0):
    """Standard output and standard error of a command that ends with ``code``."""
    got = main([str(word) for word in words])
    out, err = capsys.readouterr()
    assert got == code, err
    return out, err


# Help


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(capsys, command):
    out, err = said(capsys, command, "--help")
    assert f"lamina {command}" in out
    assert err == ""
    assert command in said(capsys, "--help")[0]


@pytest.mark.parametrize("name", SHEETS)
def test_help_of_an_experiment_has_every_setting(capsys, name):
    out, _ = said(capsys, "run", name, "--help")
    for item in dataclasses.fields(find(name).config):
        line = next(line for line in out.splitlines() if f"{plan.flag(item.name)} " in line)
        assert item.metadata["help"][:20] in line
        assert f"(default {item.default})" in " ".join(out.replace("│", " ").split())
    for item in dataclasses.fields(Settings):
        flag = plan.flag("data" if item.name == "root" else item.name)
        assert (flag in out) == (item.name not in ("command", "hours"))


def test_no_arguments_is_help_and_version(capsys):
    assert "Usage: lamina" in said(capsys)[0] if not sys.argv[1:] else True
    assert said(capsys, "--version")[0].startswith("lamina 0.")


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["run", "mnist", "--help"], ["list"], ["rn"]])
def test_light_commands_import_nothing_heavy(words):
    heavy = "torch accelerate matplotlib sklearn scipy tensorboard jinja2"
    code = f"import sys; from lamina.lab.cli.commands import main; main({words!r}); "
    code += f"sys.exit(' '.join(m for m in {heavy.split()!r} if m in sys.modules) or 0)"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 5  # a second on an idle machine; torch alone takes two


def test_list(capsys):
    out, _ = said(capsys, "list")
    for sheet in SHEETS.values():
        abouts = [scale.about for scale in sheet.scales.values()]
        assert all(word in out for word in (sheet.name, sheet.section, sheet.title, *sheet.datasets, *abouts))
    assert "lamina run mnist --help" in out


def test_output_to_a_file_has_no_colour_codes_and_is_not_wrapped(capsys):
    for words in (["list"], ["data"], ["run", "mnist", "--help"]):
        assert "\x1b" not in said(capsys, *words)[0]
    assert max(map(len, said(capsys, "data")[0].splitlines())) > 120


def test_a_reader_that_leaves_early_is_no_error():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*PYTHON, "list"], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


# Mistakes


@pytest.mark.parametrize(
    ("words", "suggestion"),
    [
        (["rnu"], "'run'"),
        (["reproduse"], "'reproduce'"),
        (["run", "mnits"], "'mnist'"),
        (["run", "mnist", "--norm", "layr"], "'layer'"),
        (["run", "mnist", "--norm", "none,bacth"], "'batch'"),
        (["run", "mnist", "--dataset", "fashion-mnist"], "'fashion_mnist'"),
        (["run", "mnist", "--engine", "graf"], "'graph'"),
        (["run", "mnist", "--scale", "lapto"], "'laptop'"),
        (["run", "mnist", "--scale", "smoke", "--norm", "layr"], "'layer'"),
        (["data", "get", "mnits"], "'mnist'"),
        (["data", "check", "cifar-10"], "'cifar10'"),
        (["data", "fetsh"], "command must be one of"),
        (["reproduce", "--only", "convent"], "'convnet'"),
        (["paper", "--data", "x", "--only", "convent"], "'convnet'"),
    ],
)
def test_did_you_mean(capsys, words, suggestion):
    assert suggestion in one_line(capsys, words)


def one_line(capsys, words, code=2):
    _, err = said(capsys, *words, code=code)
    assert err.startswith("lamina: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1, err
    return err


BAD = [
    ("run", "lamina list"),
    ("run mnist --norm", "requires an argument"),
    ("run mnist --nrom layer", "--norm"),
    ("run mnist stray", "stray"),
    ("run mnist --epochs 0", "above 0"),
    ("run mnist --epochs -1", "above 0"),
    ("run mnist --epochs many", "'many'"),
    ("run mnist --epochs nan", "finite"),
    ("run mnist --lr inf", "finite"),
    ("run mnist --lr 1e-3,zero", "'zero'"),
    ("run mnist --lr 1e-3,-1", "-1"),
    ("run mnist --lr 1e-3,1e-3", "twice"),
    ("run mnist --lr 3e-4,0.00030000001", "folder of its own"),
    ("run mnist --batch-size 1.5", "'1.5'"),
    ("run mnist --batch-size 0", "at least 1"),
    ("run mnist --batch-size 128,", "''"),
    ("run mnist --norm=", "''"),
    ("run mnist --norm ,", "''"),
    ("run mnist --hidden 8,16", "'8,16'"),
    ("run mnist --precision float16", "fp16"),
    ("run mnist --clip-by norm", "'global'"),
    ("run mnist --held-out -5", "at least 0"),
    ("run mnist --seeds 0", "'0'"),
    ("run mnist --seeds two", "'two'"),
    ("run mnist --first-seed -1", "'-1'"),
    ("run mnist --jobs 0", "'0'"),
    ("run mnist --together -1", "'-1'"),
    ("run mnist --device gpu", "'gpu'"),
    ("run mnist --resume --restart", "one of them"),
    ("run convnet --stack", "--stack"),
    ("run convnet --small", "--small"),
    ("run mnist --scale tiny", "'smoke', 'laptop', 'paper'"),
    ("run mnist --scale=smoke --batch-size 127,0", "at least 1"),
    ("run mnist --scale smoke --tuned nope.json", "its own tuned settings"),
    ("run mnist --scale smoke --norm none --batch-size 4", "at least one variant"),
    ("run mnist --updates -1", "at least 0"),
    ("run mnist --eval-updates x", "'x'"),
    ("run mnist --runs FILE", "Not a directory|File exists"),
    ("run mnist --runs FILE/below", "Not a directory"),
    ("run mnist --runs=", "no name"),
    ("run mnist --data=", "embedded"),
    ("run mnist --data MISSING", "not there"),
    ("run mnist --data FILE", "is a file"),
    ("run mnist --data EMPTY", "does not hold it"),
    ("run mnist --data HALF", "no t10k-images"),
    ("run mnist --data CORRUPT", "train-images-idx3-ubyte"),
    ("run mnist --data embedded --engine graph --device cpu", "CUDA"),
    ("run mnist --data embedded --engine compile", "'graph'"),
    ("run mnist --data embedded --batch-size 6 --accumulate 4 --device cpu", "--accumulate"),
    ("run mnist --norm layer,batch --batch-size 128,1", "at least two cases"),
    ("run convnet --norm batch --batch-size 8 --accumulate 8", "batch norm's statistics"),
    ("run mnist --data embedded --tuned nope.json", "lamina tune"),
    ("data check mnist", "lamina data get mnist"),
    ("data check mnist --data CORRUPT", "train-images-idx3-ubyte"),
    ("data get mnist --data embedded", "folder"),
    ("data get mnist --data EMPTY --mirror ftp://there", "http"),
    ("report MISSING", "not there"),
    ("report EMPTY", "no runs"),
    ("report FILE", "JSON"),
    ("report DONE --out FILE", "--out"),
    ("report DONE --out OUT --markdown EMPTY", "--markdown"),
    ("evaluate MISSING", "a folder"),
    ("evaluate EMPTY", "EMPTY, none"),
    ("evaluate OLD", "OLD, another"),
    ("evaluate DONE/mnist/mnist-embedded/layer-batch_size128-seed0", "evaluations of checkpoints"),
    ("evaluate DONE --tasks MR", "--tasks needs --suite"),
    ("evaluate DONE --suite words", "'sentences'"),
    ("evaluate DONE/mnist/mnist-embedded/layer-batch_size128-seed0 --suite sentences", "a run of mnist"),
    ("tune EMPTY", "none under EMPTY"),
    ("bench --quick --out FILE/bench.json", "--out"),
    ("bench --device tpu", "'tpu'"),
    ("reproduce --only mnist, --runs OUT", "''"),
    ("reproduce --runs FILE", "--runs"),
    ("reproduce --runs OUT --out FILE", "--out"),
    ("reproduce --seeds 0", "'0'"),
    ("paper", "--data"),
    ("paper --data EMPTY", "none in EMPTY"),
    ("paper --data MISSING", "none in MISSING"),
    ("paper --data embedded", "none in embedded"),
    ("paper --data=", "embedded"),
    ("paper --data EMPTY --hours 0", "above 0"),
    ("paper --data EMPTY --hours -1", "above 0"),
    ("paper --data EMPTY --hours nan", "above 0"),
    ("paper --data EMPTY --hours many", "--hours"),
    ("paper --data EMPTY --runs FILE", "--runs"),
    ("paper --data EMPTY --out FILE", "--out"),
    ("paper --data EMPTY --jobs 0", "'0'"),
]


@pytest.mark.parametrize(("words", "part"), BAD, ids=[words for words, _ in BAD])
def test_bad_input_is_one_line_and_code_2(capsys, tmp_path, monkeypatch, finished, words, part):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("LAMINA_DATA", raising=False)
    (tmp_path / "FILE").write_text("a file")
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "OLD").mkdir()
    (tmp_path / "OLD" / "config.json").write_text('{"schema": 1, "experiment": "mnist"}')
    (tmp_path / "DONE").symlink_to(finished)
    stems = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    for folder, names in (("HALF", stems[:2]), ("CORRUPT", stems)):
        (tmp_path / folder / "mnist").mkdir(parents=True)
        for name in names:
            (tmp_path / folder / "mnist" / name).write_bytes(b"\0\0\x08\x03 this is not what it says")
    before = sorted(p.name for p in finished.rglob("*"))
    line = one_line(capsys, words.split(" "))
    assert any(option in line for option in part.split("|"))
    assert [path.parent.name for path in tmp_path.rglob("config.json")] == ["OLD"]  # nothing has begun
    left = {path.name for path in tmp_path.iterdir()}
    assert left <= {"FILE", "EMPTY", "OLD", "DONE", "HALF", "CORRUPT"}, "a failed command leaves no folder behind"
    assert sorted(p.name for p in finished.rglob("*")) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("words", [[*SMALL[:4], "--device", "cuda"], ["bench", "--device", "cuda"]])
def test_cuda_that_is_not_there(capsys, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    assert "none found" in one_line(capsys, words)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write and read everywhere")
@pytest.mark.parametrize("words", [[*SMALL, "--runs"], [*SMALL[:2], "--data"]])
def test_folders_without_rights(capsys, tmp_path, words):
    tmp_path.chmod(0)
    try:
        one_line(capsys, [*words, tmp_path / "below"])
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize(
    ("more", "part"),
    [([], "--resume"), (["--resume", "--hidden", "9"], "config.hidden 8 stored and 9 now")],
)
def test_a_folder_that_holds_another_run(capsys, finished, more, part):
    assert part in one_line(capsys, [*SMALL, "--runs", finished, *more])


def test_a_folder_in_use(capsys, finished):
    with runs.RunFolder.open(finished / HOME / "layer-batch_size128-seed0"):
        assert "one process at a time" in one_line(capsys, [*SMALL, "--resume", "--runs", finished])


def test_jobs_under_a_launcher(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "launcher" in one_line(capsys, [*SMALL, "--jobs", "2", "--runs", tmp_path])


@pytest.mark.parametrize(
    ("error", "code", "part"),
    [
        (OSError(28, "No space left on device", "runs/x"), 1, "runs/x: No space left on device"),
        (MemoryError("x"), 1, "not enough memory"),
        (RuntimeError("CUDA out of memory. Tried to\nallocate"), 1, "smaller network"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (
            ModuleNotFoundError("no", name="accelerate.utils"),
            2,
            "accelerate is not installed. Run `pip install accelerate`, or `pip install 'lamina-nn[lab]'`",
        ),
    ],
)
def test_errors_on_the_way(capsys, monkeypatch, tmp_path, error, code, part):
    def fails(*_):
        raise error

    monkeypatch.setattr(workers, "carry_out", fails)
    assert part in one_line(capsys, [*SMALL, "--runs", tmp_path], code)


@pytest.mark.parametrize("module", ["typer", "rich"])
def test_the_command_without_a_package_of_the_lab(module):
    code = f"import sys; sys.modules[{module!r}] = None; import lamina.lab.cli.commands"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(f"lamina: {module} is not installed. Run `pip install {module}`, or")


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch, tmp_path):
    monkeypatch.setattr(workers, "carry_out", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        main([*SMALL, "--runs", str(tmp_path)])


# Which runs


def labels(sheet, seeds=(0,), **values):
    configs = plan.combine(sheet, {k: v if isinstance(v, tuple) else (v,) for k, v in values.items()})
    return [job.label for job in plan.jobs_for(sheet, configs, seeds)]


def test_every_combination_and_seed_has_a_folder_of_its_own():
    found = labels(find("mnist"), (0, 1), norm=("layer", "none"), batch_size=(128, 4), lr=(1e-3, 3e-4))
    assert len(set(found)) == 16
    assert found[:3] == [
        "layer-batch_size128-seed0",
        "layer-batch_size128-seed1",
        "layer-batch_size128-lr0.0003-seed0",
    ]


def test_a_label_follows_from_the_settings_alone():
    """A process for one job of a sweep is told that job only, and must find the same folder."""
    sheet = find("convnet")
    swept = labels(sheet, norm=("layer", "batch"), batch_size=(128, 4))
    assert swept == [
        label for n in ("layer", "batch") for b in (128, 4) for label in labels(sheet, norm=n, batch_size=b)
    ]


SIZED = Scale(
    about="a test",
    seeds=2,
    settings={"hidden": 7},
    values={"norm": ("layer", "batch"), "batch_size": (128, 4)},
    without=({"norm": "layer", "batch_size": 4},),
    tuned=({"norm": "batch", "batch_size": 4, "lr": 0.5},),
    placebo={"norm": "batch", "batch_size": 128},
)


def of_scale(**given):
    sheet = dataclasses.replace(find("mnist"), scales={"smoke": SIZED})
    return plan.jobs_of_scale(sheet, "smoke", **given)


def test_a_variant_may_have_fewer_seeds_than_the_others():
    scale = dataclasses.replace(SIZED, seeds=3, fewer=(({"norm": "batch", "batch_size": 4}, 2),), placebo={})
    sheet = dataclasses.replace(find("mnist"), scales={"smoke": scale})
    found = [(job.config.batch_size, job.seed) for job in plan.jobs_of_scale(sheet, "smoke", range(5, 8))]
    assert sorted(found) == [(4, 5), (4, 6), *((128, seed) for seed in (5, 5, 6, 6, 7, 7))]


def test_a_scale_trains_its_variants_with_tuned_settings_and_the_placebo_on_further_seeds():
    jobs = of_scale()
    variants = ("layer-batch_size128", "batch-batch_size128", "batch-batch_size4")
    assert [job.label for job in jobs] == [
        *(f"{variant}-seed{seed}" for seed in (0, 1) for variant in variants),
        "batch-batch_size128-seed2",
        "batch-batch_size128-seed3",
    ]
    assert {(job.config.norm, job.config.batch_size, job.config.lr) for job in jobs} == {
        ("layer", 128, 1e-3), ("batch", 128, 1e-3), ("batch", 4, 0.5),
    }  # fmt: skip
    assert {(job.config.hidden, job.scale) for job in jobs} == {(7, "smoke")}
    assert jobs[0].home(Path("runs"), "mnist-real") == Path("runs/mnist/mnist-real-smoke")


def test_what_is_given_counts_more_than_the_scale_and_takes_its_name_away():
    assert {(job.config.lr, job.scale) for job in of_scale(lr=(0.1,))} == {(0.1, "")}
    (only,) = of_scale(norm=("layer",), seeds=range(5, 6))
    assert (only.seed, only.config.norm, only.scale) == (5, "layer", "smoke")
    with pytest.raises(InputError, match="twice"):
        of_scale(norm=("layer", "layer"))


# Runs from end to end


def test_runs_in_two_processes(capsys, tmp_path):
    """One of them diverges: its message is shown, the other goes on, and the code says that one failed."""
    words = [*SMALL, "--epochs", "1", "--lr", "1e-3,1e30", "--jobs", "2", "--runs", tmp_path]
    out, err = said(capsys, *words, code=1)
    assert "2 run(s) on EMBEDDED STAND-IN" in out
    assert "lamina report" in out
    assert "layer-batch_size128-seed0: finished, " in err
    assert "layer-batch_size128-lr1e+30-seed0: layer-batch_size128-lr1e+30-seed0" not in err
    assert next(line for line in err.splitlines() if "not finite" in line).startswith(
        "layer-batch_size128-lr1e+30-seed0: "
    )
    assert "2 of 2 runs have ended, 1 of them failed" in err
    folder = tmp_path / HOME / "layer-batch_size128-seed0"
    assert json.loads((folder / "summary.json").read_text())["finished"]
    header = json.loads((folder / "config.json").read_text())
    assert header["command"].startswith("lamina run mnist --data embedded --hidden 8")
    assert header["command"].endswith(f"--jobs 2 --runs {tmp_path}")
    row = next(line for line in out.splitlines() if line.startswith("│") and "1e+30" not in line)
    assert "(1)" in row
    assert "layer-batch_size128-seed0" in row


def test_finished_runs_are_passed_over(capsys, finished):
    words = [*SMALL, "--norm", "layer,none", "--resume", "--runs", finished]
    for processes in ("2", "1"):
        assert said(capsys, *words, "--jobs", processes)[1].count("already finished") == 2


def test_quiet(capsys, finished):
    out, err = said(capsys, *SMALL, "--resume", "--quiet", "--runs", finished)
    assert err == ""
    assert "run(s)" not in out
    assert "LN (hidden layers), batch size 128" in out


def test_report_of_runs(capsys, finished, tmp_path):
    out, _ = said(capsys, "report", finished, "--out", tmp_path / "page", "--markdown", tmp_path / "R.md")
    assert "EMBEDDED STAND-IN" in (tmp_path / "page" / "report.html").read_text(encoding="utf-8")
    assert (tmp_path / "R.md").exists()
    assert f"report: {tmp_path / 'page' / 'report.html'}" in out
    assert all(claim.text in out for claim in find("mnist").claims)


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def begun(folder):
    return (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_size > 0


def start(*words):
    """A command in a process of its own; ends with the test whatever happens."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*PYTHON, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )


def stop(process, number, folders):
    """Send the signal once every run has begun; each must leave a checkpoint, and the last line says what to do."""
    wait_for(lambda: all(map(begun, folders)))
    os.killpg(process.pid, number)  # as a terminal's Ctrl-C, which goes to the whole group
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert err.splitlines()[-1].startswith(f"lamina: {number.name}: ")
    assert "--resume" in err.splitlines()[-1]
    assert "Traceback" not in err
    for folder in folders:
        found = runs.status(folder)
        assert (found["finished"], found["running"]) == (False, False)
        assert found["checkpoint"] > 0


@pytest.mark.slow
def test_sigterm_saves_a_checkpoint_and_resume_finishes(capsys, tmp_path):
    words = [*LONG, "--epochs", 30, "--runs", tmp_path]
    folder = tmp_path / HOME / "layer-batch_size128-seed0"
    with start(*words) as process:
        stop(process, signal.SIGTERM, [folder])
    _, err = said(capsys, *words, "--resume")
    assert "resumed at update" in err
    assert runs.status(folder)["finished"]


@pytest.mark.slow
def test_sigint_goes_to_every_process(tmp_path):
    folders = [tmp_path / HOME / f"{norm}-batch_size128-seed0" for norm in ("layer", "none")]
    words = [*LONG, "--epochs", 5000, "--norm", "layer,none,weight", "--jobs", 2, "--runs", tmp_path]
    with start(*words) as process:
        stop(process, signal.SIGINT, folders)
    assert not (tmp_path / HOME / "weight-batch_size128-seed0").exists()  # none is begun after a signal


@pytest.mark.slow
def test_children_end_with_a_parent_that_is_killed(tmp_path):
    folders = [tmp_path / HOME / f"{norm}-batch_size128-seed0" for norm in ("layer", "none")]
    with start(*LONG, "--epochs", 5000, "--norm", "layer,none", "--jobs", 2, "--runs", tmp_path) as process:
        wait_for(lambda: all(map(begun, folders)))
        process.kill()
    wait_for(lambda: not any(runs.status(folder)["running"] for folder in folders), 20)
    assert all(runs.status(folder)["checkpoint"] for folder in folders)  # and in good order
    assert not any(runs.status(folder)["finished"] for folder in folders)


@pytest.mark.slow
def test_reproduce_and_again(capsys, tmp_path):
    words = ["reproduce", "--only", "mnist", "--seeds", "1", "--epochs", "0.02", "--jobs", "2", "--device", "cpu"]
    words += ["--runs", tmp_path / "runs", "--out", tmp_path / "out"]
    out, err = said(capsys, *words)
    sheet = find("mnist")
    jobs = plan.jobs_of_scale(sheet, "smoke", range(1), epochs=(0.02,))
    assert {path.name for path in (tmp_path / "runs" / HOME).iterdir()} == {job.label for job in jobs}
    assert err.count(": finished, ") == len(jobs)
    assert f"mnist: {len(jobs)} runs done, 0 left" in err
    assert (tmp_path / "out" / "report.html").exists()
    assert f"report: {tmp_path / 'out' / 'report.html'}" in out
    assert all(claim.text in out for claim in sheet.claims)
    assert "EMBEDDED STAND-IN" in out
    _, err = said(capsys, *words)
    assert err.count("already finished") == len(jobs)


def test_paper_runs_what_the_folder_holds_stops_in_time_and_goes_on(capsys, tmp_path, monkeypatch, toy_sheet):
    monkeypatch.setitem(SHEETS, "bare", dataclasses.replace(toy_sheet, name="bare", scales={}))
    words = ["paper", "--data", toy.TEXT.parent, "--only", "toy,mnist,bare", "--jobs", "2"]
    words += ["--runs", tmp_path / "runs", "--out", tmp_path / "out"]
    out, err = said(capsys, *words, "--hours", "0.000001")
    assert "toy: lines of a story (real); a story, seconds" in out
    assert "mnist: left out. --data must be a folder with mnist in it" in out
    assert "bare: left out. It has no laptop scale" in out
    assert "1e-06 hours are over: every run saves a checkpoint" in err
    assert "4 of 4 runs left" in out
    assert "│ toy        │ 0    │ 4    │ not known yet │" in out
    out, err = said(capsys, *words)
    assert "0 of 4 runs left" in out
    assert "│ toy        │ 4    │ 0    │ -" in out
    assert re.search(r"[12] of 4 runs have ended; toy: \d runs done, \d left, ends about \w+ \d\d:\d\d", err)
    assert (tmp_path / "out" / "report.html").exists()
    homes = {path.parent.parent.name for path in tmp_path.glob("runs/toy/*/*/summary.json")}
    assert homes == {"lines-real-laptop"}


@pytest.mark.slow
def test_a_run_that_fails_or_dies_among_others_is_named_and_the_others_finish(capsys, tmp_path, toy_sheet):
    words = ["run", "toy", "--accident", "kill,none,mistake", "--updates", "4", "--device", "cpu"]
    _, err = said(capsys, *words, "--jobs", "2", "--runs", tmp_path, code=1)
    assert [path.parent.name for path in tmp_path.glob("toy/*/*/summary.json")] == ["next-seed0"]
    assert "next-kill-seed0: ended by SIGKILL, which nobody here sent (out of memory?)" in err
    assert "next-mistake-seed0: RuntimeError: a mistake of ours" in err
    assert "3 of 3 runs have ended, 2 of them failed" in err


# The machine and the data


def test_bench_writes_a_record(capsys, tmp_path):
    out, _ = said(capsys, "bench", "--quick", "--device", "cpu", "--out", tmp_path / "bench.json")
    record = records.load(tmp_path / "bench.json")
    assert (record["kind"], record["name"], record["device"]) == ("bench", "train", "cpu")
    assert [row["norm"] for row in record["rows"]] == list(NORMS)
    for row in record["rows"]:
        assert row["milliseconds"]["n"] == len(row["milliseconds"]["values"]) == record["rounds"] == 7
        low, high = row["milliseconds"]["quartiles"]
        assert low <= row["milliseconds"]["median"] <= high
        assert min(row["milliseconds"]["values"]) > 0
    plain = next(row for row in record["rows"] if row["norm"] == "none")
    layer = next(row for row in record["rows"] if row["norm"] == "layer")
    assert plain["ratio_to_none"]["values"] == [1] * 7
    ratio = layer["milliseconds"]["values"][0] / plain["milliseconds"]["values"][0]
    assert layer["ratio_to_none"]["values"][0] == pytest.approx(ratio, rel=1e-4)
    assert "Ratio to none" in out


def test_info(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("LAMINA_DATA", str(tmp_path))
    out, _ = said(capsys, "info")
    lines = dict(line.split(":", 1) for line in out.splitlines())
    assert "torch" in lines["versions"]
    assert str(tmp_path) in lines["data"]
    for name in ("lamina.LSTM", "lamina.GRU", "lamina.LayerNorm"):
        assert len(lines[name].split(":")) > 1  # the backend and why


def test_data_table_and_check(capsys, tmp_path):
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train-images-idx3-ubyte").write_bytes(b"x")
    out, _ = said(capsys, "data", "--data", tmp_path)
    lines = {line.split()[1]: line for line in out.splitlines() if line.startswith("│")}
    assert "incomplete" in lines["mnist"]
    assert "absent" in lines["cifar10"]
    assert "MIT" in lines["fashion_mnist"]
    assert "EMBEDDED STAND-IN" in said(capsys, "data", "check", "mnist", "--data", "embedded")[0]


def test_an_unreadable_data_folder_does_not_hide_the_others(capsys, monkeypatch, tmp_path):
    (tmp_path / "mnist").mkdir()
    listed = os.listdir

    def refuse(path):
        if str(path).endswith("cifar10"):
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "listdir", refuse)
    out, _ = said(capsys, "data", "--data", tmp_path)
    lines = {line.split()[1]: line for line in out.splitlines() if line.startswith("│")}
    assert "unreadable" in lines["cifar10"]
    assert "absent" in lines["mnist"]


# Leaving


@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.parametrize(("words", "code"), [("list", 0), ("lst", 2)])
def test_one_of_several_processes_leaves_at_once_with_its_output_and_code(processes, words, code):
    """Threads of torch's that outlive the interpreter would make it abort; one process alone ends as Python does."""
    script = "import atexit; atexit.register(print, 'farewell'); from lamina.lab.cli import commands; "
    script += "commands.run_and_exit()"
    command = [sys.executable, "-W", "ignore", "-c", script, words]
    done = subprocess.run(command, env={**os.environ, "WORLD_SIZE": processes}, capture_output=True, text=True)
    assert done.returncode == code
    assert ("mnist" in done.stdout) is (code == 0)
    assert ("lamina: " in done.stderr) is (code == 2)
    assert ("farewell" in done.stdout) is (processes == "1")
