"""The options that a session takes as keywords, typed, so that editors complete them.

Written by docs/generate_options.py from the option dataclasses; don't edit by hand.
"""

from typing import Literal, TypedDict


class SessionSettings(TypedDict, total=False):
    """Options of training by their Python names; one that isn't given keeps its default.

    Flat, as keywords are: a key for each option of the dataclasses.
    """

    epochs: int
    """Passes over the training set. Default: what the script's s.epochs(...) says, else 10."""

    target_accuracy: float | None
    """Stop once the validation accuracy (0 to 1) has reached this; `none` turns a recipe's own
    target off."""

    patience: int
    """How many epochs in a row must meet the target accuracy."""

    early_stopping: int | None
    """Stop after this many epochs in a row without a better validation result; `none` never
    does."""

    best_by: Literal["val_accuracy", "val_loss"]
    """Which validation figure makes a snapshot the best one."""

    time_budget: str | None
    """Train for this long, for example 2h: the schedule is fitted to it, and time is kept back
    for the last evaluation and snapshot."""

    ema: float | None
    """Keep an exponential moving average of the weights with this decay (0.999, say), which
    evaluations, the best snapshot and export take. `none` turns a recipe's own off."""

    seed: int
    """Settles the weights at the start, the order of the samples, augmentation and dropout."""

    check_every: int | None
    """Compare the workers' weights and learning rates every this many steps, bit by bit, and
    name a worker that has drifted; 0 never does. Default: 100 with --shards; else rates after
    each epoch, and weights after the first and at the end, where a difference is a warning."""

    global_batch: int | None
    """Samples that one optimizer step sees, over all workers together: not a worker's share."""

    batch_per_worker: int | None
    """Samples of each worker in a step; the global batch is then this times the number of
    workers."""

    max_batch_per_worker: int | None
    """Most samples that a worker puts through the model at once (what fits into its memory)."""

    shards: int | None
    """Reproducible mode: cut each global batch into this many fixed shards and sum their
    gradients in a fixed order. Default: one share per worker, summed as the backend does."""

    drop_last: bool
    """Leave out the short batch at the end of an epoch. Default: what the script's loader says;
    else it is used, weighted exactly."""

    loader_workers: int
    """Processes per worker that read and transform training samples, and as many for validation
    (0: none)."""

    clip_norm: float | None
    """Scale the whole gradient down to this norm when it is longer; off by default."""

    precision: Literal["fp32", "bf16", "fp16"]
    """Arithmetic of the forward and backward pass: bf16 and fp16 use autocast, fp16 with a loss
    scaler; weights stay in fp32."""

    tf32: Literal["auto", "off", "convolutions", "on"]
    """Whether NVIDIA GPUs may multiply fp32 numbers in TF32 (10 bits of fraction instead of 23,
    several times as fast): off; convolutions alone; on, in matrix products too. auto: as
    PyTorch and the script have it, by default convolutions alone."""

    deterministic: bool
    """Take kernels that give the same bits every time, where there are others, as on GPUs.
    --shards does so anyway."""

    cudnn_benchmark: bool | None
    """Have cuDNN try its kernels out for each new shape of a batch, on NVIDIA GPUs: up to
    seconds each time, and rarely faster than what it takes unasked. Default: as PyTorch and
    the script have it, which is off."""

    compile: bool
    """Compile the model with torch.compile: pays off in long trainings, costs a minute at the
    start."""

    compile_mode: Literal["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None
    """Mode of torch.compile: reduce-overhead launches CUDA graphs, so that small models don't
    wait for the host; max-autotune times kernels. Default: torch.compile's own."""

    sync_batchnorm: bool
    """Take BatchNorm's statistics over the batches of all workers instead of each worker's own."""

    allow_different_hardware: bool
    """With --shards: resume although hardware, libraries or the number of threads differ from
    before, or between workers."""

    sync: str | None
    """How the workers' gradients are combined. Default: allreduce; ordered with --shards.
    allreduce: averaged in every step. ordered: summed in a fixed order, the same bits on any
    number of workers (needs --shards). powersgd: two thin matrices instead of each large one,
    a hundredth of the bytes, an approximation."""

    sync_precision: Literal["fp32", "bf16"]
    """With allreduce: what gradients travel in. fp32: as they are. bf16: half the bytes, rounded
    to 8 bits of fraction."""

    sync_warmup_steps: int | None
    """With powersgd: average gradients in full for this many steps first. Default: the steps of
    the first epoch."""

    powersgd_rank: int
    """Columns of PowerSGD's two matrices: more are closer to the true gradient, and more bytes."""

    snapshot_every_steps: int | None
    """Write a snapshot every this many steps too; by default only epochs count."""

    snapshot_every: str | None
    """Write a snapshot each time this much time has passed too, such as 10m or 1h30m."""

    keep_last: int
    """How many of the newest snapshots are kept, besides the best one; at least 2, so that one
    damaged on disk leaves another to resume from."""

    copy_to: str | None
    """Copy each snapshot and the run's small files to a place below this URL, in the background:
    s3://bucket/prefix (extra: paceline[s3]), file:///directory, or any that fsspec has a
    driver for. `paceline resume URL/RUN` goes on from there on a machine that has nothing.
    none: no more."""

    copy_wait_s: float
    """Seconds that the end of the training waits for the last copies (Ctrl-C ends the wait)."""

    progress: Literal["auto", "bar", "plain", "off"]
    """What is shown while training. auto: a progress bar on a terminal, plain lines in a pipe."""

    log_every: int | str
    """How often figures within an epoch are recorded in steps.csv: after a number of steps, such
    as 50, or a time, such as 5s or 1m. auto: about 200 times an epoch, and every 10 s."""

    share_run_dir: bool
    """Let others read the run directory, as your umask says: a team's."""

    tensorboard: bool
    """Also write TensorBoard event files into the run directory (extra: paceline[tensorboard])."""

    tracker: tuple[str, ...]
    """Also show the run at a tracker: wandb, mlflow (extras paceline[wandb], paceline[mlflow]),
    or one that another package adds."""

    tracker_project: str | None
    """W&B's project, MLflow's experiment. Default: what the tracker's own variables say, then
    the recipe's name."""

    name: str | None
    """A name for the run, which its directory then has too: runs/NAME-TIME."""

    tag: tuple[str, ...]
    """A tag for trackers and for `paceline runs --json`."""

    note: str | None
    """What you want to remember of the run; run.json and trackers have it."""

    workers: int | None
    """Worker processes to start. Default: one per GPU, or 2 on a machine without (never more
    than its cores)."""

    threads: int | None
    """CPU threads per worker. Default: the cores shared out evenly, at least 1; with --shards 1,
    so that the bits don't follow the machine."""

    numa_affinity: Literal["auto", "on", "off"]
    """Keep each GPU worker on the CPU cores of its GPU's NUMA node. auto: where no core of the
    node is left unused by that; on: also then; off: leave the workers where they are."""

    max_restarts: int
    """Restarts allowed in a row without a newer snapshot; each newer snapshot refills them."""

    hang_after_s: float | None
    """Seconds without a finished step after which the workers count as hanging, and are ended
    and started again; at least 10 times the median step. Default: 30, with --compile 120."""

    stop_grace_s: float | None
    """Seconds that workers have after a request to stop (Ctrl-C, SIGTERM) to finish their step
    and write a snapshot; then they are killed. Default: twice what a step and the last
    snapshot took, from 3.5 (60 on nodes where a service such as Kubernetes has started this
    process; its own limit has to be longer) to 120."""

    on: str | None
    """Where workers run: local starts them on this machine, here makes this process the worker,
    auto picks here when torchrun (or the like) started it and local otherwise. node: srun has
    started this process, once a node, and it starts the node's workers."""

    init_method: str | None
    """Where workers meet, as in PyTorch: env:// (MASTER_ADDR and MASTER_PORT in the
    environment), tcp://HOST:PORT (of rank 0) or file:///PATH (a new file that all workers
    reach). Default: as the launcher says."""

    rank: int | None
    """This worker's number over all nodes, from 0, where you start each worker by hand. Default:
    as torchrun, Slurm, MPI, Kubernetes, SageMaker or SkyPilot says."""

    world_size: int | None
    """Workers over all nodes, where you start each worker by hand."""

    local_rank: int | None
    """This worker's number on its node, from 0, where you start each worker by hand: it picks
    the GPU."""

    interface: str | None
    """Network interface for the workers' sockets, such as eth0. Default: GLOO_SOCKET_IFNAME
    where it is set, else the one on the route to rank 0."""

    backend: Literal["auto", "nccl", "gloo", "mpi", "xccl", "smddp"]
    """What carries the gradients. auto: nccl between GPUs, gloo between CPU workers. mpi needs a
    PyTorch built with it, xccl is for Intel GPUs, smddp is SageMaker's."""

    device: Literal["auto", "cpu", "cuda", "xpu", "mps"]
    """What a worker computes on. auto: its own GPU where there is one, else the CPU; with
    `--backend gloo` or mpi the CPU."""

    timeout_s: float
    """Seconds after which a worker that waits for the others gives up, so that a hang becomes an
    error."""
