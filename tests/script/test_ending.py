"""Sessions without a `with` block: they end with the script, whichever way that ends."""

import sys
from pathlib import Path

import pytest

from tests.script.scripts import POINTS, at_step, command, plain, summary, torchrun, write_script
from tests.support.warm import run_warm

pytestmark = pytest.mark.ranks

SESSION = 's = paceline.session("r", resume="auto", device="cpu", loader_workers=0)'
LOOP = """
model = s.model(nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)))
optimizer = s.optimizer(torch.optim.Adam(model.parameters(), 0.01))
batches, test = s.loader(points(54, 1), global_batch=8), s.eval_loader(points(13, 2))
for epoch in s.epochs(3):
    for inputs, targets in batches:
        hook(s)
        s.step(F.cross_entropy(model(inputs), targets))
    s.evaluate(lambda b: {"mine": (model(b[0]).argmax(1) == b[1]).float()}, test)
"""


def write(directory: Path, *, session: str = SESSION, before: str = "", after: str = "") -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / "module_level.py"
    path.write_text("\n".join([POINTS, before, session, LOOP, after]))
    return path


@pytest.mark.parametrize(
    ("session", "after"),
    [
        (SESSION, ""),
        (SESSION.replace("s = ", "s = (").replace(")", ")).__enter__()"), ""),
        (SESSION, "s.close()\nprint('more')"),
        (SESSION, "sys.exit()"),
    ],
    ids=["end of script", "enter", "close", "exit"],
)
@pytest.mark.slow
def test_a_script_at_module_level_is_finished(session: str, after: str, tmp_path: Path) -> None:
    done = plain(write(tmp_path, session=session, after=after))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Finished 3 of 3 epochs. 21 steps") == 1
    assert summary(tmp_path / "r")["stopped_because"] == "epochs"
    assert done.stdout.endswith("more\n") == ("more" in after)


@pytest.mark.slow
def test_what_was_reported_is_shown_and_nothing_else(tmp_path: Path) -> None:
    """Neither a loss nor an accuracy was reported, but a figure of the script's own."""
    done = plain(write(tmp_path))
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("  validation")]
    assert line.split()[1] == "mine"
    assert 0 <= float(line.split()[2]) <= 1
    assert line.endswith("on 13 samples")
    script = tmp_path / "none" / "module_level.py"
    write(tmp_path / "none")
    script.write_text(script.read_text().replace("    s.evaluate", "    0 and s.evaluate"))
    assert "validation  none: no epoch had an s.evaluate(...)" in plain(script).stdout


@pytest.mark.slow
def test_a_script_that_raises_ends_with_1_and_its_traceback(tmp_path: Path) -> None:
    script = write(tmp_path, before=at_step(9, 0, "raise KeyError('mine')"))
    done = command([sys.executable, str(script)], tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("KeyError: 'mine'") == 1
    assert "Resume from the newest good snapshot: paceline resume" in done.stderr
    assert "Done" not in done.stdout
    assert (tmp_path / "r" / "logs" / "failure-rank-0.json").exists()
    assert not (tmp_path / "r" / "summary.json").exists()


_DISK_GONE = """
import shutil
from paceline.training import worker
worker.LAST_SNAPSHOT_S = 0.0
"""


@pytest.mark.parametrize("run", ["module", "block"])
@pytest.mark.slow
def test_a_disk_that_fails_is_named_without_a_traceback(run: str, tmp_path: Path) -> None:
    before = _DISK_GONE + at_step(9, 0, "shutil.move('r', 'moved')")
    if run == "module":
        script = write(tmp_path, before=before)
    else:
        block = f"with {SESSION.removeprefix('s = ')} as s:\n    main(s)"
        script = write_script(tmp_path, before, run=block)
    done = command([sys.executable, str(script)], tmp_path)
    assert done.returncode == 70, done.stderr
    assert done.stderr.count("paceline: ") == 1
    assert "the run directory was removed, moved or emptied" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_script_that_ends_itself_keeps_its_exit_code(tmp_path: Path) -> None:
    done = plain(write(tmp_path, before=at_step(9, 0, "sys.exit(3)")))
    assert done.returncode == 3, done.stderr
    assert "Done" not in done.stdout
    assert not (tmp_path / "r" / "summary.json").exists()


@pytest.mark.slow
def test_a_signal_saves_and_the_script_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    whole = plain(write(tmp_path / "whole"))
    assert whole.returncode == 0, whole.stderr
    script = write(tmp_path, before=at_step(9, 0, "os.kill(os.getpid(), signal.SIGTERM)"))
    first = plain(script)
    assert first.returncode == 75, first.stderr
    assert "Resume from step 10" in first.stdout
    then = plain(script)
    assert then.returncode == 0, then.stderr
    one, two = summary(tmp_path / "whole" / "r"), summary(tmp_path / "r")
    assert one["weights_sha256"] == two["weights_sha256"]


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("sys.exit()", 0),
        ("raise KeyError('mine')", 65),
        ("sys.exit(3)", 65),
        ("sys.exit(0)", 65),
    ],
)
@pytest.mark.core_cases(2)
def test_the_launcher_sees_how_it_ended(what: str, code: int, tmp_path: Path) -> None:
    session = "s = paceline.session(device='cpu', loader_workers=0)"
    before = "" if code == 0 else at_step(9, 0, what)
    after = what if code == 0 else ""
    script = write(tmp_path, session=session, before=before, after=after)
    words = ["run", script.name, "--workers", "2", "--run-dir", "r", "--max-restarts", "0"]
    done = run_warm([sys.executable, "-m", "paceline", *words], tmp_path)
    assert done.returncode == code, done.stderr
    assert (tmp_path / "r" / "summary.json").exists() == (code == 0)
    assert "no progress" not in done.stderr


@pytest.mark.slow
def test_there_is_one_session_at_a_time(tmp_path: Path) -> None:
    done = plain(write(tmp_path, after="s = paceline.session()"))
    assert done.returncode == 1
    assert "end it by s.close()" in done.stderr
    both = f"s.close()\nagain = {SESSION[4:]}\nagain.close()"
    assert plain(write(tmp_path / "both", after=both)).returncode == 0


@pytest.mark.slow
def test_a_loop_on_begin_is_counted_and_saved(tmp_path: Path) -> None:
    loop = """
model = s.model(nn.Linear(5, 2))
s.optimizer(torch.optim.SGD(model.parameters(), 0.01))
s.begin()
for _ in range(21):
    s.step(model(torch.ones(4, 5)).square().mean())
"""
    path = tmp_path / "free.py"
    path.write_text(POINTS + SESSION + loop)
    done = plain(path)
    assert done.returncode == 0, done.stderr
    assert "Finished: the script's loop is over. 21 steps in" in done.stdout
    assert "nan" not in done.stdout
    assert [p.name for p in (tmp_path / "r" / "snapshots").glob("step-*")] == [f"step-{21:012}"]


FOLDS = """
for fold in range(2):
    with paceline.session({run_dir}device="cpu", loader_workers=0, seed=fold) as s:
        model = s.model(nn.Linear(5, 2))
        s.optimizer(torch.optim.SGD(model.parameters(), 0.1))
        batches = s.loader(points(20, fold), global_batch=8)
        for epoch in s.epochs(1):
            for inputs, targets in batches:
                s.step(F.cross_entropy(model(inputs), targets))
"""


@pytest.mark.slow
def test_one_session_after_another_meets_anew(tmp_path: Path) -> None:
    """As for a cross validation; the launcher's store still has the first one's addresses."""
    script = tmp_path / "folds.py"
    script.write_text(POINTS + FOLDS.format(run_dir="f'fold-{fold}', "))
    done = torchrun(script, 2)
    assert done.returncode == 0, done.stderr
    found = [summary(tmp_path / f"fold-{fold}") for fold in range(2)]
    assert [one["steps"] for one in found] == [3, 3]
    assert found[0]["weights_sha256"] != found[1]["weights_sha256"]


@pytest.mark.slow
def test_a_second_session_in_the_launchers_run_directory_is_refused(tmp_path: Path) -> None:
    """It would have gone on with the first one's weights, and trained nothing."""
    script = tmp_path / "folds.py"
    script.write_text(POINTS + FOLDS.format(run_dir=""))
    run = ["run", str(script), "--workers", "1", "--run-dir", "r"]
    done = command([sys.executable, "-m", "paceline", *run], tmp_path)
    assert done.returncode == 65, done.stderr  # no longer "nothing was started"
    assert "has trained in its run directory already" in done.stderr


HANDLES = """
import signal
def ignore(number, frame):
    pass
before = {before}
if before:
    signal.signal(signal.SIGTERM, ignore)
with paceline.session(device="cpu", loader_workers=0, run_dir="run") as s:
    if not before:
        signal.signal(signal.SIGTERM, ignore)
    main(s, 1)
assert signal.getsignal(signal.SIGTERM) is ignore or not before
"""


@pytest.mark.parametrize("before", [True, False])
def test_handlers_of_the_scripts_own_are_told(before: bool, tmp_path: Path) -> None:
    run = HANDLES.replace("{before}", str(before))
    done = plain(write_script(tmp_path, run=run))
    assert done.returncode == 0, done.stderr
    told = "the script handles SIGTERM itself, in the session's place"
    assert (done.stdout + done.stderr).count(told) == int(not before)
