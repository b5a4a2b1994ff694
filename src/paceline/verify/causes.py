"""The causes that are known: why each makes a training another one, and how to mend it."""

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Cause:
    """Why a training isn't the same on another number of workers, or once it is resumed."""

    name: str
    why: str
    paceline: str
    """What to do in a script on `paceline.session()`."""
    torch: str
    """What to do in plain PyTorch. `{batch}` stands for the samples of a step."""
    lightning: str = ""
    """What to do in this library, where it is something else; likewise the next two."""
    accelerate: str = ""
    transformers: str = ""
    lines: tuple[str, ...] = ()
    """The kinds of lines of the script that it is the fault of, the likeliest first."""
    is_note: bool = False
    """Whether it may be intended, and makes no difference to the weights."""
    is_alike: bool = False
    """Whether it is a fault that may be the same on any number of workers."""

    def __str__(self) -> str:
        return self.name


_SEED_APART = (
    "torch.manual_seed(seed + rank), but only once all that ranks must have alike is there: after "
    "the model is built and wrapped. What is drawn alike later on (an order or a split of the "
    "samples: RandomSampler, random_split, randperm) needs generator=torch.Generator()"
    ".manual_seed(seed), or the ranks' shares would overlap"
)

NO_COMMUNICATION = Cause(
    name="no-communication",
    why="nothing makes one training of the processes: none learns from what the others have seen",
    paceline="model = s.model(net), batches = s.loader(train_set), s.step(loss)",
    torch="init_process_group(), DataLoader(..., sampler=DistributedSampler(train_set)), and "
    "model = DistributedDataParallel(model), called as model(x)",
    lines=(
        "backward",
        "step",
    ),
)
NO_SAMPLER = Cause(
    name="no-sampler",
    why="every rank trains on all samples: an epoch is as long as on one worker, and counts each "
    "sample several times",
    paceline="batches = s.loader(train_set, global_batch={batch})",
    torch="DataLoader(train_set, batch_size={batch} // world_size, "
    "sampler=DistributedSampler(train_set))",
    lines=("training loader",),
    lightning="Trainer(use_distributed_sampler=True), its default, or a sampler that shares the "
    "samples out",
    accelerate="accelerator.prepare(loader): an unprepared loader isn't shared out",
    transformers="leave the loader to Trainer, or have its sampler share the samples out",
)
SET_EPOCH = Cause(
    name="set-epoch",
    why="a DistributedSampler shuffles by (seed, epoch), and the epoch was never set the epoch",
    paceline="batches = s.loader(train_set): each of s.epochs() has an order of its own",
    torch="sampler.set_epoch(epoch) at the beginning of every epoch",
    lines=(
        "training pass",
        "training sampler",
    ),
    is_alike=True,
    lightning="Trainer calls set_epoch(epoch) of a sampler that has the method: give it one, or "
    "leave the sampler to Trainer",
    accelerate="loader.set_epoch(epoch) of the prepared loader at the beginning of every epoch",
)
EPOCH_IGNORED = Cause(
    name="epoch-ignored",
    why="readers that persist hold a copy of the data set as it was when they began: an epoch "
    "that is set in the main process doesn't reach them",
    paceline="let the data set read the epoch from shared memory: torch.tensor(0).share_memory_()",
    torch="persistent_workers=False, or an epoch in shared memory: torch.tensor(0).share_memory_()",
    lines=("training loader",),
    is_note=True,
)
DROP_LAST = Cause(
    name="drop-last",
    why="each rank leaves the rest of its own share out, so more workers lose more samples",
    paceline="s.loader(train_set): a short last batch is used, each sample with its exact "
    "weight; drop_last=True drops the same samples on any number",
    torch="a batch size and a data set that divide evenly, or drop_last=False with losses "
    "weighted by their number of samples",
    lines=(
        "training sampler",
        "training loader",
    ),
)
PADDED_TRAINING = Cause(
    name="padded-training",
    why="DistributedSampler needs equal shares and fills them up from the beginning",
    paceline="s.loader(train_set): shares may be unequal, nothing is repeated",
    torch="a sampler of your own that shares unevenly, with Join and weighted losses",
    lines=(
        "training sampler",
        "training loader",
    ),
    accelerate="Accelerator(even_batches=False) and join_uneven_inputs, or a data set that divides",
)
PADDED_EVALUATION = Cause(
    name="padded-evaluation",
    why="what is counted twice has twice the weight in the figure",
    paceline="s.evaluate(judge, s.eval_loader(test_set)): every sample exactly once",
    torch="evaluate Subset(test_set, range(rank, len(test_set), world_size)) and add sums and "
    "counts up with all_reduce",
    lines=(
        "evaluation sampler",
        "evaluation loader",
    ),
    lightning="Trainer(devices=1) for the evaluation, or a sampler that repeats none",
    accelerate="accelerator.gather_for_metrics(...) instead of gather: it drops what was repeated",
)
DROPPED_EVALUATION = Cause(
    name="dropped-evaluation",
    why="the figure is of another part of the data on every number of workers",
    paceline="s.evaluate(judge, s.eval_loader(test_set)): every sample exactly once",
    torch="DataLoader(Subset(test_set, range(rank, len(test_set), world_size)), drop_last=False)",
    lines=(
        "evaluation loader",
        "evaluation sampler",
    ),
)
SHARES_OVERLAP = Cause(
    name="shares-overlap",
    why="a sampler deals one order of one data set out to all ranks: where order or data set is "
    "each rank's own, some samples are dealt twice and others never, and a rank may train on "
    "what another one validates with",
    paceline="s.loader(train_set): one order for all; paceline.session() seeds all workers alike "
    "before the data are split",
    torch="random_split(data, lengths, generator=torch.Generator().manual_seed(seed)) and one "
    "seed for DistributedSampler, both the same on all ranks, and set_epoch(epoch) on each of "
    "them",
    lines=("training sampler",),
)
OTHER_SAMPLES = Cause(
    name="other-samples",
    why="what a step learns from follows the number of workers",
    paceline="batches = s.loader(train_set): the order of samples doesn't know the workers",
    torch="draw one order from (seed, epoch) on all ranks; let each rank take its part of every "
    "global batch",
    lines=(
        "training sampler",
        "training loader",
    ),
)
OTHER_VALUES = Cause(
    name="other-values",
    why="something that the samples are prepared with follows the number of workers: mean and "
    "variance of a rank's share, its own vocabulary, or random numbers drawn once",
    paceline="prepare the data before s.loader(train_set), from all of them, alike on every worker",
    torch="compute such figures from the whole data set on every rank, or all_reduce sums and "
    "counts",
    lines=("training loader",),
)
NOT_FINITE = Cause(
    name="not-finite",
    why="weights that aren't finite learn nothing any more; what comes after isn't compared",
    paceline="s.step(loss) stops at a loss that isn't finite on any worker",
    torch="find the batch by torch.isfinite(loss); leave it out on all ranks alike: "
    "all_reduce(MAX) of a flag before the decision",
    lines=(
        "loss",
        "backward",
    ),
    is_alike=True,
)
DECIDED_BY_ONE = Cause(
    name="decided-by-one",
    why="one rank decides by what it sees itself: the others' batches have no say in it",
    paceline="s.skip() on the worker whose batch is to be left out: the others count as they are",
    torch="all_reduce(MAX) of a flag on all ranks, then one decision by all",
    lines=(
        "broadcast",
        "collective",
        "training pass",
    ),
)
BATCH_SKIPPED = Cause(
    name="batch-skipped",
    why="a rank that skips a batch by itself meets the others' next step one batch ahead: from "
    "then on steps are made of other samples",
    paceline="s.skip() in place of the batch's step: that worker counts for nothing in it",
    torch="all_reduce a flag and skip on all ranks or on none, or train on the batch with a loss "
    "of weight 0",
    lines=(
        "continue",
        "training pass",
    ),
)
BATCH_GROWS = Cause(
    name="batch-grows",
    why="a larger batch is another training, also where the learning rate is scaled",
    paceline="s.loader(train_set, global_batch={batch}): the batch of a step, over all workers",
    torch="DataLoader(batch_size={batch} // world_size)",
    lines=("training loader",),
    lightning="the loader's batch_size is one worker's: DataLoader(batch_size={batch} // devices)",
    accelerate="DataLoaderConfiguration(split_batches=True): the loader's batch_size is a step's",
    transformers="per_device_train_batch_size={batch} // devices",
)
RATE_STAYS = Cause(
    name="rate-stays",
    why="N times the samples make N times fewer updates of the same size: training is slower by "
    "about N",
    paceline="s.loader(train_set, global_batch={batch}) keeps the batch; recipes scale by "
    "--lr-scaling",
    torch="DataLoader(batch_size={batch} // world_size), or lr * world_size with a warm-up",
    lines=(
        "training loader",
        "optimizer",
    ),
    lightning="DataLoader(batch_size={batch} // devices), or a scaled rate with a warm-up",
    accelerate="DataLoaderConfiguration(split_batches=True), or a scaled rate with a warm-up",
    transformers="per_device_train_batch_size={batch} // devices, or a scaled learning_rate with "
    "warmup_steps",
)
RATE_DIFFERS = Cause(
    name="rate-differs",
    why="updates have another size from this step on",
    paceline="keep the global batch, and with it the learning rate",
    torch="compute the learning rate and its schedule from the global batch and its steps",
    lines=(
        "optimizer",
        "schedule",
    ),
)
RATE_APART = Cause(
    name="rate-apart",
    why="each rank lowers its learning rate when its own figure stops falling: sooner or later "
    "the rates are apart, and the same gradients make different weights",
    paceline="schedule.step(s.evaluate(judge, s.eval_loader(test_set))[...]): the figure of all "
    "samples",
    torch="all_reduce the sum and the count of the figure before schedule.step(figure)",
    lines=("schedule",),
)
SCHEDULE_PER_WORKER = Cause(
    name="schedule-per-worker",
    why="the schedule runs ahead of the training",
    paceline="scheduler = s.scheduler(...); scheduler.step() once a step or an epoch, on every "
    "worker",
    torch="one scheduler.step() a step on every rank, not one for each worker",
    lines=("schedule",),
)
GRADIENT_FACTOR = Cause(
    name="gradient-factor",
    why="plain SGD then learns with another learning rate on every number of workers; with Adam, "
    "weight decay, clipping and eps weigh otherwise",
    paceline="s.step(loss) with a mean loss: the ranks' gradients are averaged by their samples",
    torch="a mean loss (reduction='mean') where gradients are averaged, as "
    "DistributedDataParallel does; a sum, (loss * world_size).backward(), where sums are meant",
    lines=(
        "collective",
        "loss",
        "backward",
    ),
)
MEAN_OF_MEANS = Cause(
    name="mean-of-means",
    why="DistributedDataParallel averages the ranks' gradients with equal weights, whatever the "
    "size of their batches",
    paceline="s.step(loss): weighted by samples",
    torch="(loss * len(batch) * world_size / samples_of_all_ranks).backward()",
    lines=(
        "loss",
        "backward",
    ),
)
WEIGHED_ALIKE = Cause(
    name="weighed-alike",
    why="the mean of the ranks' losses isn't the batch's: one that is a mean over few items "
    "counts as much as one over many, and what sees a share alone gives another loss than what "
    "sees the batch",
    paceline="of a mean over items s.step(loss, weight=items), over how many this worker's is; "
    "of what sees a whole batch pad to a fixed length (or mask what is padded), and for Dice or "
    "pairs s.gather(...) before the loss",
    torch="of a mean over items count = all_reduce(SUM) of them on all ranks, then "
    "(sum_of_losses * world_size / count).backward(); else pad to a fixed length, or "
    "torch.distributed.nn.functional.all_gather before the loss",
    lines=(
        "loss",
        "backward",
    ),
)
ACROSS_SAMPLES = Cause(
    name="across-samples",
    why="a loss over pairs or ranks of samples (contrastive, triplets) finds fewer of them in a "
    "rank's share than in the batch",
    paceline="embeddings, labels = s.gather(embeddings), s.gather(labels) before the loss: those "
    "of all workers, with their gradients",
    torch="torch.distributed.nn.functional.all_gather(embeddings): those of all ranks, with "
    "their gradients",
    lines=(
        "loss",
        "backward",
    ),
)
CLIPPED_EARLY = Cause(
    name="clipped-early",
    why="the norm of a part isn't that of the whole: how much is cut off follows the number of "
    "parts",
    paceline="--clip-norm, or clip right before optimizer.step() of a session",
    torch="clip_grad_norm_ once, right before optimizer.step(), when all gradients are added up "
    "and combined",
    lines=("clip",),
)
WINDOW_LEFT_OPEN = Cause(
    name="window-left-open",
    why="an epoch's last micro-batches make no step, and their gradients are added to the next "
    "epoch's first step",
    paceline="s.backward(loss, more=True) for all but a window's last micro-batch: an epoch's "
    "end closes the window",
    torch="step for the epoch's last micro-batches too, divided by their own number, or "
    "optimizer.zero_grad() at the beginning of every epoch",
    lines=(
        "step",
        "training pass",
    ),
    is_alike=True,
)
MOVED_PER_MICRO_BATCH = Cause(
    name="moved-per-micro-batch",
    why="an average of the weights (a teacher, say) that is moved with every micro-batch moves "
    "as often as a step has micro-batches, and that follows the number of workers",
    paceline="move it under `if s.step(loss):`, once a step",
    torch="move it right after optimizer.step(), once a step",
    lines=("backward",),
)
BATCHNORM_SHARE = Cause(
    name="batchnorm-share",
    why="mean and variance over fewer samples are others, and noisier",
    paceline="--shards V (the same bits on up to V workers), or --sync-batchnorm",
    torch="SyncBatchNorm.convert_sync_batchnorm(model) on GPUs, or GroupNorm",
    lines=("batchnorm",),
    lightning="Trainer(sync_batchnorm=True) on GPUs, or GroupNorm",
)
SAME_DROPOUT = Cause(
    name="same-dropout",
    why="all ranks have one seed: their masks are copies, and the noise doesn't average out",
    paceline="nothing: s.epochs() seeds every step and rank",
    torch=_SEED_APART,
    lines=("seed",),
    lightning="torch.manual_seed(seed + rank) in on_train_start, or after fabric.setup(model)",
    accelerate="accelerate.utils.set_seed(seed, device_specific=True) after the model is built",
    transformers="a TrainerCallback whose on_train_begin calls torch.manual_seed(seed + rank)",
)
SAME_AUGMENTATION = Cause(
    name="same-augmentation",
    why="all ranks have one seed: samples of different ranks are changed alike",
    paceline="s.loader(data, augment=...) draws by sample; data sets of your own are seeded by "
    "sample",
    torch=_SEED_APART + "; the same for random and NumPy",
    lines=("seed",),
)
SAME_NOISE = Cause(
    name="same-noise",
    why="all ranks have one seed: what they draw are copies, and the noise doesn't average out",
    paceline="nothing: s.epochs() seeds every step and rank",
    torch=_SEED_APART,
    lines=("seed",),
)
BUFFERS_APART = Cause(
    name="buffers-apart",
    why="each rank updates its buffers from its own share, and nothing brings them together",
    paceline="s.model(net), s.evaluate(...): floating buffers are averaged where the model is "
    "judged",
    torch="DistributedDataParallel(model, broadcast_buffers=True) and evaluation through it, or "
    "all_reduce the buffers before",
    lines=(
        "wrap",
        "batchnorm",
    ),
)
START_APART = Cause(
    name="start-apart",
    why="the ranks were seeded differently, or built something else, and nothing has made them "
    "alike",
    paceline="model = s.model(net): all workers begin with rank 0's weights",
    torch="the same torch.manual_seed(seed) before the model is built, or "
    "DistributedDataParallel(model)",
    lines=(
        "seed",
        "optimizer",
    ),
)
OTHER_START = Cause(
    name="other-start",
    why="what is drawn before the training depends on the number of workers",
    paceline="paceline.session() seeds before the script builds its model",
    torch="torch.manual_seed(seed) right before the model is built",
    lines=(
        "seed",
        "optimizer",
    ),
)
FILE_RACE = Cause(
    name="file-race",
    why="the second rank reads half a file, or writes into the first one's",
    paceline="if paceline.is_main(): write it; read it when the session has begun",
    torch="init_process_group() first, write on rank 0 alone, then dist.barrier()",
    is_note=True,
)
WRAPPER_BYPASSED = Cause(
    name="wrapper-bypassed",
    why="DistributedDataParallel prepares to combine gradients in its own forward pass: without "
    "it each rank trains by itself",
    paceline="model = s.model(net) and s.step(loss): gradients are combined whatever was called",
    torch="call the wrapper, model(x), also for what computes the loss: move it into the "
    "module's forward()",
    lines=(
        "bypass",
        "wrap",
    ),
)
NO_SYNC = Cause(
    name="no-sync",
    why="DistributedDataParallel combines gradients in the backward pass after a forward pass "
    "outside of no_sync() only: each rank trains by itself",
    paceline="s.backward(loss, more=True) for all but the last micro-batch",
    torch="forward and backward pass of the last micro-batch of a step outside of model.no_sync()",
    lines=(
        "no_sync",
        "unsynced",
    ),
)
SCALE_APART = Cause(
    name="scale-apart",
    why="gradients are combined as they are scaled; each rank then divides by a factor of its own",
    paceline="--precision fp16: all workers have one scale",
    torch="the same GradScaler arguments on all ranks, as many scaler.update() on each, and its "
    "state_dict in the checkpoint",
    lines=("scaler",),
)
LATE_PARAMETER = Cause(
    name="late-parameter",
    why="DistributedDataParallel combines the gradients of the parameters that it finds when it "
    "is made",
    paceline="s.model(net) when the model is complete",
    torch="replace, add, freeze or prune parameters before DistributedDataParallel(model)",
    lines=(
        "late",
        "wrap",
    ),
)
THAWED_LATE = Cause(
    name="thawed-late",
    why="DistributedDataParallel combines the gradients of the parameters that needed one when "
    "it was made",
    paceline="s.model(net) combines the gradients of whatever needs one in a step",
    torch="make the wrapper again, DistributedDataParallel(model.module), once parameters are "
    "thawed; or thaw them before",
    lines=("thawed", "wrap"),
)
WEIGHTS_APART = Cause(
    name="weights-apart",
    why="the ranks' gradients aren't combined, or their optimizers differ: each trains by itself",
    paceline="model = s.model(net) and s.step(loss)",
    torch="model = DistributedDataParallel(model), called as model(x), with one optimizer's "
    "settings",
    lines=(
        "step",
        "backward",
    ),
)
UNEQUAL_STEPS = Cause(
    name="unequal-steps",
    why="all ranks take part in every step: those that still have batches wait for the others",
    paceline="s.loader(train_set): all workers have as many steps, whatever the data",
    torch="DistributedSampler, or the context manager Join",
    lines=("training loader",),
)
WAITS_APART = Cause(
    name="waits-apart",
    why="all ranks make the same collective calls in the same order, or wait for each other",
    paceline="s.step, s.evaluate and s.sum on all workers; only what prints or saves under "
    "s.is_main",
    torch="no collective call, barrier included, under `if rank == 0`; as many steps on every rank",
)
METRIC_FACTOR = Cause(
    name="metric-factor",
    why="a sum over ranks was divided by them, or a mean was added up",
    paceline="s.evaluate(judge, s.eval_loader(test_set)), or s.sum(count)",
    torch="all_reduce(SUM) of counts and of their total, then one division",
    lines=("reduced", "evaluation pass"),
)
METRIC_MEANS = Cause(
    name="metric-means",
    why="the mean of means isn't the mean where shares are unequal",
    paceline="s.evaluate(judge, s.eval_loader(test_set)): each sample counts once",
    torch="all_reduce(SUM) of sums and of counts, then one division",
    lightning="a torchmetrics metric, which adds up sums and counts; sync_dist=True averages means",
    accelerate="accelerator.gather_for_metrics(...) of each sample's figure, then one mean",
    lines=("reduced", "evaluation pass"),
)
METRIC_APART = Cause(
    name="metric-apart",
    why="what is combined twice, or of another number of parts, follows the number of ranks",
    paceline="s.evaluate(judge, s.eval_loader(test_set))",
    torch="sums and counts of each rank's own samples, all_reduce(SUM) once at the end, then one "
    "division",
    lines=("reduced", "evaluation pass"),
)
METRIC_SHARE = Cause(
    name="metric-share",
    why="each rank knows its own share only, and rank 0 prints",
    paceline="s.evaluate(judge, s.eval_loader(test_set))",
    torch="all_reduce(SUM) of sums and of counts before rank 0 prints",
    is_note=True,
    lightning="self.log(..., sync_dist=True), or a torchmetrics metric",
    accelerate="accelerator.gather_for_metrics(...) before the figure is computed",
)
FIGURE_DIFFERS = Cause(
    name="figure-differs",
    why="weights are the same, so the figure is computed from other samples, or otherwise",
    paceline="s.evaluate(judge, s.eval_loader(test_set)): each sample counts once",
    torch="all_reduce(SUM) of sums and of counts, then one division",
    is_note=True,
)
DATA_DRAWS = Cause(
    name="data-draws",
    why="what a sample gets depends on what was drawn before it, and that on the number of "
    "workers and of reader processes",
    paceline="draw from torch's, NumPy's or random's own functions: a session seeds them by sample",
    torch="seed by (epoch, index) in the data set's __getitem__",
    lines=("training loader",),
    is_note=True,
)
CHANCE = Cause(
    name="chance",
    why="each rank draws from generators of its own: no fault, but what comes after can't be "
    "compared any further",
    paceline="augment=... of s.loader is drawn by sample; with --shards all is the same on any "
    "number",
    torch="seed by (epoch, index) in the data set's __getitem__ to make it comparable",
    is_note=True,
)
UNKNOWN = Cause(
    name="unknown",
    why="more than rounding, and none of the known causes",
    paceline="compare what this step computes: --steps 1, and this tensor",
    torch="the same; does anything follow world_size or rank?",
    lines=(
        "loss",
        "backward",
    ),
)
NEEDS_GPU = Cause(
    name="needs-gpu",
    why="where there are fewer GPUs than workers, verify trains on the CPU, and a script that "
    "chooses its device by itself does so too",
    paceline="model = s.model(net): it and the batches of s.loader are put where the worker trains",
    torch="x.to(device) rather than x.cuda(), torch.cuda.set_device and device_ids=[local_rank] "
    "only on a GPU, torch.load(..., map_location=device). Or verify where each has a GPU",
)
FAILED = Cause(
    name="failed",
    why="the script doesn't run on this number of workers",
    paceline="paceline run SCRIPT.py --workers N shows the whole traceback",
    torch="torchrun --standalone --nproc-per-node N SCRIPT.py",
)
