"""The verification itself: which trainings are launched, and what is compared with what."""

import random
from dataclasses import replace

from paceline.errors import JobError
from paceline.options.command_line import note
from paceline.options.figures import plural
from paceline.verify.compare import LEAST, compare, given_limits, measured_limits
from paceline.verify.events import Drew, Ended, FileRead
from paceline.verify.launches import LaunchPart, VerifyLauncher
from paceline.verify.resume import Launches, choose_again, choose_step, compare_resumed
from paceline.verify.resume_report import resume_report
from paceline.verify.text_report import Part, Report, counts_report
from paceline.verify.trace import Trace, cut_up_before
from paceline.verify.verdict import (
    evaluate_first,
    evaluate_launch,
    needs_yardstick,
    not_run,
    unseen,
)

Verified = tuple[Report, tuple[tuple[str, Trace], ...]]
"""What was found, and the launches by name; the first isn't compared."""


def verify_counts(launcher: VerifyLauncher) -> Verified:
    """Train on all numbers of workers, and compare each with the first.

    Raises:
        JobError: How much rounding alone changes can't be measured.
    """
    request, options = launcher.request, launcher.request.options
    # Phase 1: train on each number of workers.
    first = launcher.launch(request.workers[0])
    counts = request.workers[1:] if first.steps and not first.failure else ()
    others = [launcher.launch(count) for count in counts]
    launches = [(plural(trace.workers, "worker"), trace) for trace in (first, *others)]
    # Indices of data that a script has cut up for its ranks are each rank's own.
    cut_up = frozenset[int]().union(*(cut_up_before(first, other) for other in others))
    first, *others = (replace(trace, by_content=cut_up) for trace in (first, *others))
    # Phase 2: how much may differ? The user's tolerance, or what rounding alone does to this
    # training, measured by one that is disturbed by a rounding error.
    limits, yardstick = given_limits(float(options.tolerance or 0)), None
    if options.tolerance is None and needs_yardstick(first, others):
        disturbed = launcher.launch(
            request.workers[0], LaunchPart(name="disturbed", is_disturbed=True)
        )
        name = f"{plural(disturbed.workers, 'worker')} disturbed"
        launches.append((name, disturbed))
        found = compare(first, replace(disturbed, by_content=cut_up))
        if not found.differences:
            raise JobError("the training could not be measured: give a --tolerance, such as 1e-4")
        limits = measured_limits(found)
        yardstick = Part(name=name, trace=disturbed, comparison=found, verdict="the yardstick")
    if launcher.keeps_dropout and not (first.in_session or first.failure):
        note("--shards has no effect here: it is for recipes and for scripts on paceline.session()")
    # Phase 3: compare each with the first.
    results = [evaluate_first(first), *(evaluate_launch(first, other, limits) for other in others)]
    results += [not_run(first, count) for count in request.workers[1 + len(others) :]]
    dropout = not (launcher.keeps_dropout and first.in_session) and any(
        drew.by == "dropout" for trace in (first, *others) for r in trace.of(Drew) for drew in r
    )
    own = unseen([first, *others], limits, cut_at=options.steps, dropout=dropout)
    return counts_report(results, limits, [*own], yardstick), tuple(launches)


def verify_resume(launcher: VerifyLauncher) -> Verified:
    """Train, undisturbed; train again, and kill it; start it again, twice.

    Raises:
        JobError: The training fails by itself, or is too short to be killed.
    """
    options = launcher.request.options
    (workers,) = launcher.request.workers
    # Undisturbed: says how many steps there are, and so where to kill.
    whole = launcher.launch(workers, LaunchPart(name="undisturbed"))
    if len(whole.steps) < 2 and not whole.failure:
        read = [f"; it has read {event.path}" for event in whole.by_rank_0(FileRead)[-1:]]
        number = plural(len(whole.steps), "step")
        raise JobError(f"{number} can't be interrupted: --resume needs at least two{''.join(read)}")
    kill_at = options.kill_at_step or choose_step(whole, random.SystemRandom().random())
    if kill_at >= len(whole.steps) and not whole.failure:
        raise JobError(
            f"--kill-at-step is {kill_at}, and the training takes "
            f"{plural(len(whole.steps), 'step')} in three epochs (cut off by --steps): say fewer"
        )
    killed, named = whole, [("undisturbed", whole)]
    if not whole.failure:
        part = LaunchPart(name="killed", run="parted", kill_at=kill_at, hash_seed="1")
        killed = launcher.launch(workers, part)
        named.append((part.name, killed))
    if killed.failure:
        raise JobError(f"the script fails by itself: {killed.failure}")
    launches = Launches(
        whole=whole,
        killed=killed,
        kill_at=kill_at,
        saved=tuple(launcher.written("parted")),
        cut_at=options.steps,
    )
    # How much may differ? Another number of workers adds in another order.
    others = options.resume_workers or workers
    limits = given_limits(LEAST if options.tolerance is None else float(options.tolerance))
    if others != workers and options.tolerance is None:
        disturbed = launcher.launch(workers, LaunchPart(name="disturbed", is_disturbed=True))
        named.append(("disturbed", disturbed))
        limits = measured_limits(compare(whole, disturbed))
    # Started again in the same directory, killed once more and started again.
    for name, kill in (("resumed", choose_again(whole, kill_at)), ("resumed again", 0)):
        part = LaunchPart(
            name=name,
            run="parted",
            kill_at=kill,
            more_args=options.resume_words,
            hash_seed=str(len(named)),
        )
        resumed = launcher.launch(others, part)
        named.append((name, resumed))
        launches = replace(launches, resumed=(*launches.resumed, resumed))
        result = compare_resumed(launches, limits)
        if not (kill and result.is_good) or any(resumed.by_rank_0(Ended)):
            break
    return resume_report(result), tuple(named)
