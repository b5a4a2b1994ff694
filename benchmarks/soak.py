"""Random faults done to whole trainings, run after run; each must end as documented.

    python -m benchmarks.soak --runs 20 --seed 1 [--json FILE] [--jobs 2]
    python -m benchmarks.soak --list
    python -m benchmarks.soak --only "SIGKILL to rank 0" --runs 3
    python -m benchmarks.soak --seed 1 --number 17

A run is one short training with `--shards` on one to three workers, to which one or two faults are
done at random moments, and which is then resumed, on other numbers of workers too, until it is
done. Its weights must be those of a training that nobody disturbed, bit for bit; every command must
end with a documented exit code and name the cause; no process, temporary file or shared memory may
stay, every snapshot must be whole, and the run directory may hold what is documented alone.
"""

import argparse
import json
import shlex
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path

from benchmarks.injection.draw import Draw, Form, draw, runs
from benchmarks.injection.table import KINDS, missing, traits
from benchmarks.injection.trial import Record, run_apart, undisturbed

_SAME: Mapping[Form, tuple[Form, ...]] = {"recipe": ("recipe", "file"), "script": ("script",)}
"""Forms whose trainings are the same: one of them is done undisturbed."""
_TRIES = 3
"""Of a run whose fault came too late."""


def main(words: Sequence[str]) -> int:
    """Run the command; 1 where a run didn't end as documented."""
    about = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=(__doc__ or "").partition("\n")[0]
    )
    about.add_argument("--runs", type=int, default=20)
    about.add_argument("--seed", type=int, default=0, help="settles what is drawn")
    about.add_argument(
        "--number", type=int, nargs="+", help="do only the runs of these numbers of the seed"
    )
    about.add_argument("--only", action="append", default=[], metavar="KIND")
    about.add_argument("--list", action="store_true", help="list the kinds of faults")
    about.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    about.add_argument("--json", type=Path, help="keep results in this file, and go on with them")
    asked = about.parse_args(words)
    for name in asked.only:
        if name not in KINDS:
            about.error(f"--only {name!r}: no such kind; --list shows all")
    left_out = missing()
    if asked.list:
        print("\n".join(f"{n}{f'  (needs {left_out[n]})' if n in left_out else ''}" for n in KINDS))
        return 0
    if left_out:
        print("Left out, for want of:", *sorted(set(left_out.values())), sep="\n  ")
        print("These are:", *left_out, sep="\n  ")
    records = read_records(asked.json, asked.seed)
    todo = [d for d in _asked_for(asked, left_out) if d.number not in records]
    records |= _do_all(todo, asked, records)
    counted = [records[d.number] for d in _asked_for(asked, left_out) if d.number in records]
    print("\n" + table(counted))
    failed = [record for record in counted if record.problems]
    print(f"\n{len(counted) - len(failed)} of {len(counted)} runs ended as documented")
    return 1 if failed else 0


def _asked_for(asked: argparse.Namespace, left_out: Mapping[str, str]) -> list[Draw]:
    if asked.number is not None:
        drawn = [draw(asked.seed, number, traits()) for number in asked.number]
        if needs := {left_out[kind] for one in drawn for kind in one.kinds if kind in left_out}:
            raise SystemExit(f"these runs need {', '.join(needs)}")
        return drawn
    return list(islice(runs(asked.seed, traits(), left_out, asked.only), asked.runs))


def _do_all(
    todo: Sequence[Draw], asked: argparse.Namespace, before: Mapping[int, Record]
) -> dict[int, Record]:
    """Do the runs; the file of results is kept up to date meanwhile."""
    if not todo:
        return {}
    rooms = Path(tempfile.mkdtemp(prefix="paceline-soak-"))
    found: dict[int, Record] = {}
    pool = ThreadPoolExecutor(asked.jobs)
    try:
        wanted = {form: _undisturbed_hash(form, rooms) for form in _SAME if _has(todo, form)}
        do = partial(_do, rooms=rooms, wanted=wanted)
        for future in as_completed([pool.submit(do, drawn) for drawn in todo]):
            record = future.result()
            found[record.number] = record
            print(describe(record, asked.seed, rooms), flush=True)
            write_records(asked.json, asked.seed, {**before, **found})
    finally:
        pool.shutdown(cancel_futures=True)
        if not any(rooms.iterdir()):
            rooms.rmdir()
    return found


def _has(todo: Iterable[Draw], form: Form) -> bool:
    return any(drawn.form in _SAME[form] for drawn in todo)


def _undisturbed_hash(form: Form, rooms: Path) -> str:
    room = rooms / f"undisturbed-{form}"
    drawn = undisturbed(form)
    record = run_apart(drawn, room, None)
    if record.problems:
        raise SystemExit(f"the undisturbed training failed, see {room}: {record.problems[0]}")
    found: str = json.loads((room / "run" / "summary.json").read_text())["weights_sha256"]
    shutil.rmtree(room)
    return found


def _do(drawn: Draw, rooms: Path, wanted: Mapping[Form, str]) -> Record:
    """Do a run; again where its fault came too late. The room of a failure is kept."""
    for number in range(_TRIES):
        room = rooms / f"run-{drawn.number}-{number}"
        (hashed,) = (found for form, found in wanted.items() if drawn.form in _SAME[form])
        record = run_apart(drawn, room, hashed)
        if not record.problems or (record.missed and number < _TRIES - 1):
            shutil.rmtree(room)
        if not record.missed:
            break
    return record


def describe(record: Record, seed: int, rooms: Path) -> str:
    """Tell a run in a line; a failure with its problems, and how to repeat it."""
    how = f"{record.form} on {record.workers}, codes {', '.join(map(str, record.codes))}"
    line = f"{record.number:4d}  {' + '.join(record.kinds)}  ({how}; {record.seconds:.0f} s)"
    if not record.problems:
        return line
    again = shlex.join(
        ["python", "-m", "benchmarks.soak", f"--seed={seed}", f"--number={record.number}"]
    )
    lines = (
        f"{line}  {'CAME TOO LATE' if record.missed else 'FAILED'}",
        *record.problems,
        f"      repeat: {again}",
        f"      kept: {rooms}/run-{record.number}-*",
    )
    return "\n".join(lines)


def table(records: Iterable[Record]) -> str:
    """Show as Markdown how many runs each kind had, and how many ended as documented."""
    counted, good = Counter[str](), Counter[str]()
    for record in records:
        for kind in record.kinds:
            counted[kind] += 1
            good[kind] += not record.problems
    rows = [("fault", "runs", "ended as documented"), ("---",) * 3]
    rows += [(k, str(counted[k]), str(good[k])) for k in KINDS if counted[k]]
    rows.append(("all", str(sum(counted.values())), str(sum(good.values()))))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def read_records(path: Path | None, seed: int) -> dict[int, Record]:
    """Read the results so far, by number; none where there is no file.

    Raises:
        SystemExit: They are of another seed.
    """
    if path is None or not path.exists():
        return {}
    content = json.loads(path.read_text())
    if content["seed"] != seed:
        raise SystemExit(f"{path} holds runs of --seed {content['seed']}, not {seed}")
    read = map(Record.from_json, content["records"])
    return {record.number: record for record in read}


def write_records(path: Path | None, seed: int, records: Mapping[int, Record]) -> None:
    """Replace the file of results."""
    if path is None:
        return
    content = {"seed": seed, "records": [asdict(records[n]) for n in sorted(records)]}
    temporary = path.with_name(f"{path.name}.part")
    temporary.write_text(json.dumps(content, indent=1))
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
