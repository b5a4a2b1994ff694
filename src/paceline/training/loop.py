"""The training loop of a recipe, written on the session as a user's own loop is."""

from paceline.training.losses import as_scores
from paceline.training.recipe_session import RecipeTraining


def train(t: RecipeTraining) -> None:
    """Train from wherever the run directory stands to the end. Collective: every worker runs it.

    Raises:
        InterruptedTraining: A signal came; what was trained is saved.
    """
    s = t.session
    epochs = s.epochs()  # restore
    s.engine.validation.measure_time(t.evaluate_batch, t.validation)  # for a time budget
    for _ in epochs:  # afterwards evaluate, record, save
        for batch in t.train.batches():  # fetch: made on the device, or brought there
            inputs, targets = batch.pair()
            outputs = as_scores(t.model(inputs))  # forward
            s.step(t.loss(outputs, targets), outputs=outputs, targets=targets)
        s.evaluate(t.evaluate_batch, t.validation)
