"""Which passes train, and when enough epochs were seen."""

import pytest

from paceline.verify.observing.passes import Pass, Passes
from paceline.verify.trial import EnoughSeenError

TRAINING, VALIDATION = 1, 2


@pytest.fixture
def passes() -> Passes:
    return Passes(most_steps=4, most_epochs=2)


def train(passes: Passes, own: Pass, batches: int = 1) -> None:
    for _ in range(batches):
        passes.draw(own)
        passes.forward(with_gradients=True)
        passes.backward()
        passes.step()


def evaluate(passes: Passes, own: Pass, batches: int) -> None:
    for _ in range(batches):
        passes.draw(own)
        passes.forward(with_gradients=False)


def test_a_validation_within_an_epoch_ends_nothing(passes: Passes) -> None:
    training = passes.begin(TRAINING)
    for _ in range(3):
        train(passes, training)
        validation = passes.begin(VALIDATION)
        evaluate(passes, validation, 2)  # and is left by a `break`
    assert (training.trains, training.steps, training.is_open) == (True, 3, True)
    assert not validation.trained
    train(passes, training)
    assert passes.is_long(training)


def test_a_pass_over_the_training_loader_without_steps_is_no_epoch(passes: Passes) -> None:
    for _ in range(2):
        own = passes.begin(TRAINING)
        train(passes, own, 2)
        passes.end(own)
        judged = passes.begin(TRAINING)
        evaluate(passes, judged, 2)
        passes.end(judged)
    third = passes.begin(TRAINING)
    passes.draw(third)
    with pytest.raises(EnoughSeenError):
        passes.backward()


def test_an_epoch_left_by_a_break_is_done_when_the_next_one_trains(passes: Passes) -> None:
    for _ in range(2):
        train(passes, passes.begin(TRAINING), 2)
    third = passes.begin(TRAINING)
    passes.draw(third)
    with pytest.raises(EnoughSeenError):
        passes.backward()


def test_a_short_loader_that_is_cycled_waits_for_the_long_one(passes: Passes) -> None:
    long = passes.begin(TRAINING)
    for _ in range(3):
        short = passes.begin(VALIDATION)
        passes.draw(long)
        passes.draw(short)
        assert passes.backward() == ((TRAINING, 0), (VALIDATION, short.number))
        passes.step()
        passes.end(short)


def test_epochs_of_one_batch_that_was_taken_ahead_count(passes: Passes) -> None:
    for _ in range(2):
        own = passes.begin(TRAINING)
        passes.draw(own)
        passes.end(own)
        assert passes.backward() == ((own.loader, own.number),)
        assert own.trained == 1
    own = passes.begin(TRAINING)
    passes.draw(own)
    passes.end(own)
    with pytest.raises(EnoughSeenError):
        passes.backward()


def test_batches_whose_losses_are_added_up_are_all_trained_on(passes: Passes) -> None:
    own = passes.begin(TRAINING)
    for _ in range(4):
        passes.draw(own)
        passes.forward(with_gradients=True)
    passes.backward()
    assert own.trained == 4


def test_a_pass_that_only_evaluates_is_cut_off_at_last(passes: Passes) -> None:
    own = passes.begin(VALIDATION)
    evaluate(passes, own, 199)
    assert not passes.is_long(own)
    evaluate(passes, own, 1)
    assert passes.is_long(own)
