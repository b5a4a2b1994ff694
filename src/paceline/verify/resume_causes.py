"""The causes that are known why a training isn't the same once it is resumed."""

from paceline.verify.causes import Cause

NOT_REPEATABLE = Cause(
    name="not-repeatable",
    why="two launches of one command differ before anything was done to them, so what a "
    "resumed one may differ in can't be told",
    paceline="paceline.session() seeds all generators; seed a model that is built before it",
    torch="torch.manual_seed(seed), random.seed(seed) and numpy.random.seed(seed) before the "
    "first use, generator=torch.Generator().manual_seed(seed) for loaders",
)
NOT_RESUMED = Cause(
    name="not-resumed",
    why="all steps before the failure are lost, and trained again",
    paceline="paceline resume RUN_DIR, or the restarts of paceline run: the newest snapshot is "
    "loaded",
    torch="load the newest checkpoint at the start if there is one; give what the script "
    "needs for that by --resume-args",
)
WEIGHTS_NOT_RESTORED = Cause(
    name="weights-not-restored",
    why="the training goes on from weights that it never had",
    paceline="s.model(net) saves and restores all of it",
    torch="model.load_state_dict(checkpoint['model'], strict=True), before wrapping or with "
    "the same names, in full precision",
)
KEYS_IGNORED = Cause(
    name="keys-ignored",
    why="load_state_dict(strict=False) leaves out what has another name, without a word",
    paceline="s.model(net) saves and restores all of it by the model's own names",
    torch="load strictly; take prefixes off (module., _orig_mod.) where the model was wrapped"
    " or compiled when it was saved",
)
ORDER_NOT_RESTORED = Cause(
    name="order-not-restored",
    why="some samples are trained on twice, others not at all",
    paceline="batches = s.loader(train_set): goes on at the sample where it stopped",
    torch="save at the ends of epochs and draw each epoch's order from (seed, epoch), by "
    "sampler.set_epoch(epoch) or a generator of its own; torchdata's StatefulDataLoader"
    " goes on within an epoch",
    lines=(
        "training sampler",
        "training loader",
        "training pass",
    ),
    accelerate="DataLoaderConfiguration(use_seedable_sampler=True), loader.set_epoch(epoch), and "
    "skip_first_batches(loader, steps) within an epoch",
)
RANDOM_NOT_RESTORED = Cause(
    name="random-not-restored",
    why="dropout and augmentation draw again what was drawn before, or something else",
    paceline="a session restores the generators of torch, and seeds each sample's",
    torch="save and restore torch.get_rng_state(), torch.cuda.get_rng_state_all(), "
    "random.getstate() and numpy.random.get_state(), on every rank",
    lines=("seed",),
)
RANDOM_OF_ONE_RANK = Cause(
    name="random-of-one-rank",
    why="all ranks go on with the random numbers of the rank that saved, and draw alike "
    "from there on",
    paceline="a session saves and restores each worker's generators",
    torch="gather each rank's generator states on the rank that saves, and restore each its own",
    lines=("rng_state", "seed"),
)
OPTIMIZER_NOT_RESTORED = Cause(
    name="optimizer-not-restored",
    why="momentum and Adam's averages begin at zero again: the loss jumps",
    paceline="s.optimizer(...) saves and restores its state",
    torch="optimizer.load_state_dict(checkpoint['optimizer']), after the model is on its device",
    lines=("optimizer",),
)
SCHEDULE_NOT_RESTORED = Cause(
    name="schedule-not-restored",
    why="the learning rate begins anew, with its warm-up, or stays where it was",
    paceline="s.scheduler(...) saves and restores its state",
    torch="scheduler.load_state_dict(checkpoint['scheduler']) and the optimizer's, which "
    "holds the learning rate; or a learning rate that is computed from the step",
    lines=("schedule",),
)
SCHEDULE_BY_ENUMERATE = Cause(
    name="enumerate-restarts",
    why="enumerate() begins at 0 again, so what goes by its number begins anew in the midst"
    " of an epoch",
    paceline="s.step_in_epoch and s.steps_done go on where they were",
    torch="count steps in the checkpoint, or enumerate(loader, start=steps_in_the_epoch)",
    lines=("training pass",),
)
SCALE_NOT_RESTORED = Cause(
    name="scale-not-restored",
    why="the loss scale begins anew: steps are skipped until it has come down",
    paceline="--precision fp16: the session saves and restores its scaler",
    torch="scaler.load_state_dict(checkpoint['scaler'])",
    lines=("scaler",),
)
BUFFERS_NOT_RESTORED = Cause(
    name="buffers-not-restored",
    why="evaluations use running statistics that aren't those of the training",
    paceline="s.model(net) saves and restores all of it",
    torch="save model.state_dict(), which has buffers, not only its parameters",
    lines=("batchnorm",),
)
NOT_SAVED = Cause(
    name="not-saved",
    why="the weights that are trained are the same: something else that counts isn't in the "
    "checkpoint, or isn't restored",
    paceline="s.keep(...) saves and restores objects of your own, ema= the average of the weights",
    torch="save and restore what is kept beside model and optimizer as well: averages of the "
    "weights, the best figure so far, counters",
    lines=("eval",),
)
