"""The training loop, written on the session as a user's own loop would be."""

from paceline.trainer.session import Session


def train(s: Session) -> None:
    """Train from wherever the session stands to its end. Collective: every worker runs it."""
    s.start_clock()
    while s.can_continue():
        for batch in s.batches():  # fetch: made on the device, or brought there
            s.step(batch)  # forward, backward, combine, update
            if s.due_to_agree():
                s.agree()  # count, show, hear of signals and clocks
            if s.due_to_save():
                s.snapshot()
            if s.stopping is not None:
                break
        trained = s.agree()
        if s.stopping == "signal":
            s.snapshot(must=True)
        else:
            best = s.close_epoch(trained.totals)  # evaluate, judge, record
            s.snapshot(best=best, must=True)
