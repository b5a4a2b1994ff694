"""Why each cause makes a training different, and how to mend it, in Paceline and in plain torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.verify.finding import Cause


@dataclass(frozen=True)
class Advice:
    """What is known of a cause."""

    why: str
    paceline: str
    torch: str


_SEED_APART = (
    "torch.manual_seed(seed + rank), but only once all that ranks must have alike is there: after "
    "the model is built and wrapped. What is drawn alike later on (an order or a split of the "
    "samples: RandomSampler, random_split, randperm) needs generator=torch.Generator()"
    ".manual_seed(seed), or the ranks' shares would overlap"
)

ADVICE: Mapping[Cause, Advice] = {
    Cause.NO_COMMUNICATION: Advice(
        "nothing makes one training of the processes: none learns from what the others have seen",
        "model = s.model(net), batches = s.loader(train_set), s.step(loss): see "
        "docs/reference/session.md",
        "init_process_group(), DataLoader(..., sampler=DistributedSampler(train_set)), and "
        "model = DistributedDataParallel(model), called as model(x)",
    ),
    Cause.NO_SAMPLER: Advice(
        "every rank trains on all samples: an epoch is as long as on one worker, and counts each "
        "sample several times",
        "batches = s.loader(train_set, global_batch=64)",
        "DataLoader(train_set, batch_size=64 // world_size, sampler=DistributedSampler(train_set))",
    ),
    Cause.SET_EPOCH: Advice(
        "a DistributedSampler shuffles by (seed, epoch), and nobody has told it the epoch",
        "batches = s.loader(train_set): each of s.epochs() has an order of its own",
        "sampler.set_epoch(epoch) at the beginning of every epoch",
    ),
    Cause.DROP_LAST: Advice(
        "each rank leaves the rest of its own share out, so more workers lose more samples",
        "s.loader(train_set): a short last batch is used, each sample with its exact weight; "
        "drop_last=True drops the same samples on any number",
        "a batch size and a data set that divide evenly, or drop_last=False with losses weighted "
        "by their number of samples",
    ),
    Cause.PADDED_TRAINING: Advice(
        "DistributedSampler needs equal shares and fills them up from the beginning",
        "s.loader(train_set): shares may be unequal, nothing is repeated",
        "a sampler of your own that shares unevenly, with Join and weighted losses",
    ),
    Cause.SHARES_OVERLAP: Advice(
        "a sampler deals one order of one data set out to all ranks: where order or data set is "
        "each rank's own, some samples are dealt twice and others never, and a rank may train on "
        "what another one validates with",
        "s.loader(train_set): one order for all; paceline.session() seeds all workers alike before "
        "the data are split",
        "random_split(data, lengths, generator=torch.Generator().manual_seed(seed)) and one seed "
        "for DistributedSampler, both the same on all ranks, and set_epoch(epoch) on each of them",
    ),
    Cause.PADDED_EVALUATION: Advice(
        "what is counted twice has twice the weight in the figure",
        "s.evaluate(judge, s.eval_loader(test_set)): every sample exactly once",
        "evaluate Subset(test_set, range(rank, len(test_set), world_size)) and add sums and "
        "counts up with all_reduce",
    ),
    Cause.DROPPED_EVALUATION: Advice(
        "the figure is of another part of the data on every number of workers",
        "s.evaluate(judge, s.eval_loader(test_set)): every sample exactly once",
        "DataLoader(Subset(test_set, range(rank, len(test_set), world_size)), drop_last=False)",
    ),
    Cause.OTHER_SAMPLES: Advice(
        "what a step learns from follows the number of workers",
        "batches = s.loader(train_set): the order of samples doesn't know the workers",
        "draw one order from (seed, epoch) on all ranks; let each rank take its part of every "
        "global batch",
    ),
    Cause.BATCH_GROWS: Advice(
        "a larger batch is another training, also where the learning rate is scaled",
        "s.loader(train_set, global_batch=64): the batch of a step, over all workers",
        "DataLoader(batch_size=64 // world_size)",
    ),
    Cause.RATE_STAYS: Advice(
        "N times the samples make N times fewer updates of the same size: training is slower by "
        "about N",
        "s.loader(train_set, global_batch=64) keeps the batch; recipes scale by --lr-scaling",
        "DataLoader(batch_size=64 // world_size), or lr * world_size with a warm-up "
        "(Goyal et al. 2017)",
    ),
    Cause.RATE_DIFFERS: Advice(
        "updates have another size from this step on",
        "keep the global batch, and with it the learning rate",
        "compute the learning rate and its schedule from the global batch and its steps",
    ),
    Cause.RATE_APART: Advice(
        "each rank lowers its learning rate when its own figure stops falling: sooner or later the "
        "rates are apart, and the same gradients make different weights",
        "schedule.step(s.evaluate(judge, s.eval_loader(test_set))[...]): the figure of all samples",
        "all_reduce the sum and the count of the figure before schedule.step(figure)",
    ),
    Cause.SCHEDULE_PER_WORKER: Advice(
        "the schedule runs ahead of the training",
        "scheduler = s.scheduler(...); scheduler.step() once a step or an epoch, on every worker",
        "one scheduler.step() a step on every rank, not one for each worker",
    ),
    Cause.GRADIENT_FACTOR: Advice(
        "plain SGD then learns with another learning rate on every number of workers; with Adam, "
        "weight decay, clipping and eps weigh otherwise",
        "s.step(loss) with a mean loss: the ranks' gradients are averaged by their samples",
        "a mean loss (reduction='mean') where gradients are averaged, as DistributedDataParallel "
        "does; a sum, (loss * world_size).backward(), where sums are meant",
    ),
    Cause.MEAN_OF_MEANS: Advice(
        "DistributedDataParallel averages the ranks' gradients with equal weights, whatever the "
        "size of their batches",
        "s.step(loss): weighted by samples",
        "(loss * len(batch) * world_size / samples_of_all_ranks).backward()",
    ),
    Cause.WEIGHED_ALIKE: Advice(
        "the mean of the ranks' losses isn't the batch's: one that is a mean over few items counts "
        "as much as one over many, and what sees a share alone gives another loss than what sees "
        "the batch",
        "of a mean over items s.step(loss, weight=items), over how many this worker's is; of what "
        "sees a whole batch pad to a fixed length (or mask what is padded), and for Dice or pairs "
        "s.gather(...) before the loss",
        "of a mean over items count = all_reduce(SUM) of them on all ranks, then "
        "(sum_of_losses * world_size / count).backward(); else pad to a fixed length, or "
        "torch.distributed.nn.functional.all_gather before the loss",
    ),
    Cause.ACROSS_SAMPLES: Advice(
        "a loss over pairs or ranks of samples (contrastive, triplets) finds fewer of them in a "
        "rank's share than in the batch",
        "embeddings, labels = s.gather(embeddings), s.gather(labels) before the loss: those of all "
        "workers, with their gradients",
        "torch.distributed.nn.functional.all_gather(embeddings): those of all ranks, with their "
        "gradients",
    ),
    Cause.CLIPPED_EARLY: Advice(
        "the norm of a part isn't that of the whole: how much is cut off follows the number of "
        "parts",
        "--clip-norm, or clip right before optimizer.step() of a session",
        "clip_grad_norm_ once, right before optimizer.step(), when all gradients are added up and "
        "combined",
    ),
    Cause.BATCHNORM_SHARE: Advice(
        "mean and variance over fewer samples are others, and noisier",
        "--shards V (the same bits on up to V workers), or --sync-batchnorm",
        "SyncBatchNorm.convert_sync_batchnorm(model) on GPUs, or GroupNorm",
    ),
    Cause.SAME_DROPOUT: Advice(
        "all ranks have one seed: their masks are copies, and the noise doesn't average out",
        "nothing: s.epochs() seeds every step and rank",
        _SEED_APART,
    ),
    Cause.SAME_AUGMENTATION: Advice(
        "all ranks have one seed: samples of different ranks are changed alike",
        "s.loader(data, augment=...) draws by sample; data sets of your own are seeded by sample",
        f"{_SEED_APART}; the same for random and NumPy",
    ),
    Cause.SAME_NOISE: Advice(
        "all ranks have one seed: what they draw are copies, and the noise doesn't average out",
        "nothing: s.epochs() seeds every step and rank",
        _SEED_APART,
    ),
    Cause.OTHER_VALUES: Advice(
        "something that the samples are prepared with follows the number of workers: mean and "
        "variance of a rank's share, its own vocabulary, or random numbers drawn once",
        "prepare the data before s.loader(train_set), from all of them, alike on every worker",
        "compute such figures from the whole data set on every rank, or all_reduce sums and counts",
    ),
    Cause.MODES_APART: Advice(
        "dropout and BatchNorm do something else in evaluation mode: what this rank learns isn't "
        "what the others learn",
        "s.evaluate(...) on all workers: it leaves the mode as it was",
        "model.train() on every rank after an evaluation, also where rank 0 alone evaluates",
    ),
    Cause.BUFFERS_APART: Advice(
        "each rank updates its buffers from its own share, and nothing brings them together",
        "s.model(net), s.evaluate(...): floating buffers are averaged where the model is judged",
        "DistributedDataParallel(model, broadcast_buffers=True) and evaluation through it, or "
        "all_reduce the buffers before",
    ),
    Cause.START_APART: Advice(
        "the ranks were seeded differently, or built something else, and nothing has made them "
        "alike",
        "model = s.model(net): all workers begin with rank 0's weights",
        "the same torch.manual_seed(seed) before the model is built, or "
        "DistributedDataParallel(model)",
    ),
    Cause.START_HIDDEN: Advice(
        "harmless for these weights; but whatever else is drawn at random when ranks start "
        "(a split of the data, say) differs between them too",
        "model = s.model(net); paceline.session() seeds all workers alike",
        "torch.manual_seed(seed) on all ranks before the model is built",
    ),
    Cause.OTHER_START: Advice(
        "what is drawn before the training hangs on the number of workers",
        "paceline.session() seeds before the script builds its model",
        "torch.manual_seed(seed) right before the model is built",
    ),
    Cause.MODELS_DIFFER: Advice(
        "all ranks have to build the same model",
        "model = s.model(net) says at once which parameter differs",
        "build the model from settings that all ranks read alike",
    ),
    Cause.WRAPPER_BYPASSED: Advice(
        "DistributedDataParallel prepares to combine gradients in its own forward pass: without "
        "it each rank trains by itself",
        "model = s.model(net) and s.step(loss): gradients are combined whatever was called",
        "call the wrapper, model(x), also for what computes the loss: move it into the module's "
        "forward()",
    ),
    Cause.NO_SYNC: Advice(
        "DistributedDataParallel combines gradients in the backward pass after a forward pass "
        "outside of no_sync() only: each rank trains by itself",
        "s.backward(loss, more=True) for all but the last micro-batch",
        "forward and backward pass of the last micro-batch of a step outside of model.no_sync()",
    ),
    Cause.SCALE_APART: Advice(
        "gradients are combined as they are scaled; each rank then divides by a factor of its own",
        "--precision fp16: all workers have one scale",
        "the same GradScaler arguments on all ranks, as many scaler.update() on each, and its "
        "state_dict in the checkpoint",
    ),
    Cause.LATE_PARAMETER: Advice(
        "DistributedDataParallel combines the gradients of the parameters that it finds when it is "
        "made",
        "s.model(net) when the model is complete",
        "replace, add, freeze or prune parameters before DistributedDataParallel(model)",
    ),
    Cause.WEIGHTS_APART: Advice(
        "the ranks' gradients aren't combined, or their optimizers differ: each trains by itself",
        "model = s.model(net) and s.step(loss)",
        "model = DistributedDataParallel(model), called as model(x), with one optimizer's settings",
    ),
    Cause.UNEQUAL_STEPS: Advice(
        "every step is a meeting of all ranks; whoever has no batch doesn't come",
        "s.loader(train_set): all workers have as many steps, whatever the data",
        "DistributedSampler, or the context manager Join",
    ),
    Cause.WAITS_APART: Advice(
        "every collective call is a meeting of all ranks, in the same order on each",
        "s.step, s.evaluate and s.sum on all workers; only what prints or saves under s.is_main",
        "no collective call, barrier included, under `if rank == 0`; as many steps on every rank",
    ),
    Cause.NO_GRADIENT: Advice(
        "they stay as they are; DistributedDataParallel stops over them in the second step unless "
        "it is told find_unused_parameters=True",
        "s.step(loss) names them and goes on",
        "leave them out, parameter.requires_grad_(False), or find_unused_parameters=True",
    ),
    Cause.METRIC_FACTOR: Advice(
        "a sum over ranks was divided by them, or a mean was added up",
        "s.evaluate(judge, s.eval_loader(test_set)), or s.sum(count)",
        "all_reduce(SUM) of counts and of their total, then one division",
    ),
    Cause.METRIC_MEANS: Advice(
        "the mean of means isn't the mean where shares are unequal",
        "s.evaluate(judge, s.eval_loader(test_set)): each sample counts once",
        "all_reduce(SUM) of sums and of counts, then one division",
    ),
    Cause.METRIC_APART: Advice(
        "what is combined twice, or of another number of parts, follows the number of ranks",
        "s.evaluate(judge, s.eval_loader(test_set))",
        "sums and counts of each rank's own samples, all_reduce(SUM) once at the end, then one "
        "division",
    ),
    Cause.METRIC_SHARE: Advice(
        "each rank knows its own share only, and rank 0 prints",
        "s.evaluate(judge, s.eval_loader(test_set))",
        "all_reduce(SUM) of sums and of counts before rank 0 prints",
    ),
    Cause.FIGURES: Advice(
        "weights are the same, so the evaluation itself isn't",
        "let judge give each figure as its mean over the batch, or an element for each sample",
        "all_reduce(SUM) of sums and of counts, then one division",
    ),
    Cause.NOT_REPEATABLE: Advice(
        "two launches of one command differ before anything was done to them, so what a resumed "
        "one may differ in can't be told",
        "paceline.session() seeds all generators; seed a model that is built before it",
        "torch.manual_seed(seed), random.seed(seed) and numpy.random.seed(seed) before the first "
        "use, generator=torch.Generator().manual_seed(seed) for loaders",
    ),
    Cause.NOT_RESUMED: Advice(
        "all steps before the failure are lost, and trained again",
        "paceline resume RUN_DIR, or the restarts of paceline run: the newest snapshot is loaded",
        "load the newest checkpoint at the start if there is one; give what the script needs for "
        "that by --resume-args",
    ),
    Cause.WEIGHTS_NOT_RESTORED: Advice(
        "the training goes on from weights that it never had",
        "s.model(net) saves and restores all of it",
        "model.load_state_dict(checkpoint['model'], strict=True), before wrapping or with the same "
        "names, in full precision",
    ),
    Cause.ORDER_NOT_RESTORED: Advice(
        "some samples are trained on twice, others not at all",
        "batches = s.loader(train_set): goes on at the sample where it stopped",
        "save at the ends of epochs and draw each epoch's order from (seed, epoch), by "
        "sampler.set_epoch(epoch) or a generator of its own; torchdata's StatefulDataLoader goes "
        "on within an epoch",
    ),
    Cause.RANDOM_NOT_RESTORED: Advice(
        "dropout and augmentation draw again what was drawn before, or something else",
        "a session restores the generators of torch, and seeds each sample's",
        "save and restore torch.get_rng_state(), torch.cuda.get_rng_state_all(), "
        "random.getstate() and numpy.random.get_state(), on every rank",
    ),
    Cause.OPTIMIZER_NOT_RESTORED: Advice(
        "momentum and Adam's averages begin at zero again: the loss jumps",
        "s.optimizer(...) saves and restores its state",
        "optimizer.load_state_dict(checkpoint['optimizer']), after the model is on its device",
    ),
    Cause.SCHEDULE_NOT_RESTORED: Advice(
        "the learning rate begins anew, with its warm-up, or stays where it was",
        "s.scheduler(...) saves and restores its state",
        "scheduler.load_state_dict(checkpoint['scheduler']) and the optimizer's, which holds the "
        "learning rate; or a learning rate that is computed from the step",
    ),
    Cause.SCALE_NOT_RESTORED: Advice(
        "the loss scale begins anew: steps are skipped until it has come down",
        "--precision fp16: the session saves and restores its scaler",
        "scaler.load_state_dict(checkpoint['scaler'])",
    ),
    Cause.BUFFERS_NOT_RESTORED: Advice(
        "evaluations use running statistics that aren't those of the training",
        "s.model(net) saves and restores all of it",
        "save model.state_dict(), which has buffers, not only its parameters",
    ),
    Cause.CHANCE: Advice(
        "each rank draws from generators of its own: no fault, but what comes after can't be "
        "compared any further",
        "augment=... of s.loader is drawn by sample; with --shards all is the same on any number",
        "seed by (epoch, index) in the data set's __getitem__ to make it comparable",
    ),
    Cause.UNKNOWN: Advice(
        "more than rounding, and none of the known causes",
        "compare what this step computes: --steps 1, and this tensor",
        "the same; does anything follow world_size or rank?",
    ),
    Cause.NEEDS_GPU: Advice(
        "where there are fewer GPUs than workers, verify trains on the CPU, and a script that "
        "chooses its device by itself does so too",
        "model = s.model(net): it and the batches of s.loader are put where the worker trains",
        'device = torch.device("cuda", local_rank) if torch.cuda.is_available() else '
        'torch.device("cpu"); x.to(device) rather than x.cuda(), torch.cuda.set_device and '
        "device_ids=[local_rank] only on a GPU, torch.load(..., map_location=device). Or verify "
        "on a machine with a GPU for each worker",
    ),
    Cause.FAILED: Advice(
        "the script doesn't run on this number of workers",
        "paceline run SCRIPT.py --workers N shows the whole traceback",
        "torchrun --standalone --nproc-per-node N SCRIPT.py",
    ),
}
