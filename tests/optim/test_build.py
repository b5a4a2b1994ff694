"""Each optimizer updates as its paper or torch's plain loop does, and gives the same bits again."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adam, AdamW, Optimizer

from paceline.errors import JobError, UsageError
from paceline.optim import build
from paceline.optim.build import build_optimizer, takes_fused
from paceline.optim.options import OptimOptions
from paceline.optim.table import OPTIMIZERS, OptimizerName

LR = 0.05
STEPS = 6

State = dict[str, Tensor]
Update = Callable[[Tensor, Tensor, State], Tensor]
"""(weights, gradient, state to change) -> new weights."""


def _net() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))


def _gradients(module: nn.Module, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    """Made-up gradients for each step; their length varies, so that scaling by it would show."""
    generator = torch.Generator().manual_seed(11)
    return [
        [
            10.0 ** (step % 3 - 1) * torch.randn(p.shape, generator=generator).to(dtype)
            for p in module.parameters()
        ]
        for step in range(STEPS)
    ]


def _train(net: nn.Module, optimizer: Optimizer, steps: range = range(STEPS)) -> list[Tensor]:
    gradients = _gradients(net)
    for step in steps:
        for parameter, gradient in zip(net.parameters(), gradients[step], strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [parameter.detach().clone() for parameter in net.parameters()]


def _built(options: OptimOptions, steps: range = range(STEPS)) -> list[Tensor]:
    net = _net()
    return _train(net, build_optimizer(options, net.named_parameters(), LR), steps)


def _by_formula(update: Update) -> list[Tensor]:
    """The same training in double precision by a formula."""
    net = _net().double()
    weights = [parameter.detach() for parameter in net.parameters()]
    states: list[State] = [{} for _ in weights]
    for gradients in _gradients(net, torch.float64):
        trios = zip(weights, gradients, states, strict=True)
        weights = [update(weight, gradient, state) for weight, gradient, state in trios]
    return [weight.float() for weight in weights]


TORCHS: list[tuple[OptimOptions, Callable[[nn.Module], Optimizer]]] = [
    (OptimOptions(), lambda m: SGD(m.parameters(), LR, foreach=False)),
    (
        OptimOptions(momentum=0.9, nesterov=True, weight_decay=1e-2),
        lambda m: SGD(
            m.parameters(), LR, momentum=0.9, nesterov=True, weight_decay=1e-2, foreach=False
        ),
    ),
    (
        OptimOptions(optimizer="adam", betas=(0.8, 0.9), eps=1e-6, weight_decay=1e-2),
        lambda m: Adam(
            m.parameters(), LR, betas=(0.8, 0.9), eps=1e-6, weight_decay=1e-2, foreach=False
        ),
    ),
    (OptimOptions(optimizer="adam"), lambda m: Adam(m.parameters(), LR, foreach=False)),
    (OptimOptions(optimizer="adamw"), lambda m: AdamW(m.parameters(), LR, foreach=False)),
    (
        OptimOptions(optimizer="adamw", weight_decay=0.0),
        lambda m: AdamW(m.parameters(), LR, weight_decay=0.0, foreach=False),
    ),
    (OptimOptions(optimizer="adadelta"), lambda m: Adadelta(m.parameters(), LR, foreach=False)),
    (
        OptimOptions(optimizer="adadelta", rho=0.8, weight_decay=1e-2),
        lambda m: Adadelta(m.parameters(), LR, rho=0.8, weight_decay=1e-2, foreach=False),
    ),
]


@pytest.mark.parametrize(("options", "make"), TORCHS)
def test_equals_torchs_plain_loop(
    options: OptimOptions, make: Callable[[nn.Module], Optimizer]
) -> None:
    net = _net()
    torch.testing.assert_close(_built(options), _train(net, make(net)), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_one_kernel_for_all_weights_updates_as_torchs_plain_loop(name: OptimizerName) -> None:
    options = OptimOptions(optimizer=name, momentum=0.9 if name == "sgd" else None)
    net = _net()
    optimizer = build_optimizer(options, net.named_parameters(), LR, fused=True)
    assert (optimizer.param_groups[0]["fused"], optimizer.param_groups[0]["foreach"]) == (
        True,
        False,
    )
    torch.testing.assert_close(_train(net, optimizer), _built(options), rtol=1e-5, atol=1e-6)


GPU = torch.device("cuda")


@pytest.mark.parametrize(
    ("options", "device", "exact", "fused"),
    [
        (OptimOptions(), GPU, False, True),
        (OptimOptions(), torch.device("xpu"), False, True),
        (OptimOptions(), torch.device("cpu"), False, False),
        (OptimOptions(), torch.device("mps"), False, False),
        (OptimOptions(), GPU, True, False),  # the bits are those of trainings begun before
        (OptimOptions(fused=True), GPU, True, True),
        (OptimOptions(fused=False), GPU, False, False),
        (OptimOptions(optimizer="lamb"), GPU, False, False),
    ],
)
def test_where_one_kernel_is_taken(
    options: OptimOptions, device: torch.device, exact: bool, fused: bool
) -> None:
    assert takes_fused(options, device, exact=exact) is fused


def test_an_optimizer_without_such_a_kernel_says_which_have_one() -> None:
    with pytest.raises(UsageError, match=r"lars has no fused kernel.* one: sgd, adam, adamw$"):
        OptimOptions(optimizer="lars", fused=True)


def _novograd(beta1: float, beta2: float, decay: float, averaging: bool) -> Update:
    def update(weight: Tensor, gradient: Tensor, state: State) -> Tensor:
        square = gradient.pow(2).sum()
        first = not state
        state["v"] = square if first else beta2 * state["v"] + (1 - beta2) * square
        term = gradient / (state["v"].sqrt() + 1e-8) + decay * weight
        weighed = (1 - beta1) * term if averaging else term
        state["m"] = term if first else beta1 * state["m"] + weighed
        return weight - LR * state["m"]

    return update


@pytest.mark.parametrize("betas", [(0.95, 0.98), (0.95, 0.0)])
@pytest.mark.parametrize("averaging", [False, True])
def test_novograd_equals_its_formula(betas: tuple[float, float], averaging: bool) -> None:
    """Ginsburg et al. 2019, arXiv:1905.11286, algorithm 1."""
    options = OptimOptions(
        optimizer="novograd", betas=betas, weight_decay=0.01, grad_averaging=averaging
    )
    expected = _by_formula(_novograd(*betas, 0.01, averaging))
    torch.testing.assert_close(_built(options), expected, rtol=1e-4, atol=1e-6)


def _lars(momentum: float, decay: float) -> Update:
    def update(weight: Tensor, gradient: Tensor, state: State) -> Tensor:
        change = gradient
        if weight.ndim > 1:
            ratio = 1e-3 * weight.norm() / (gradient.norm() + decay * weight.norm())
            change = ratio * (gradient + decay * weight)
        state["m"] = momentum * state.get("m", torch.zeros_like(weight)) + change
        return weight - LR * state["m"]

    return update


def test_lars_equals_its_formula() -> None:
    """You et al. 2017, arXiv:1708.03888, algorithm 1; tensors of one dimension by plain SGD."""
    options = OptimOptions(optimizer="lars", weight_decay=0.01)
    torch.testing.assert_close(_built(options), _by_formula(_lars(0.9, 0.01)), rtol=1e-4, atol=1e-6)


def _lamb(decay: float) -> Update:
    def update(weight: Tensor, gradient: Tensor, state: State) -> Tensor:
        zero = torch.zeros_like(weight)
        state["m"] = 0.9 * state.get("m", zero) + 0.1 * gradient
        state["v"] = 0.999 * state.get("v", zero) + 0.001 * gradient**2
        change = state["m"] / (state["v"].sqrt() + 1e-6) + decay * weight
        sizes = weight.norm().clamp(max=10.0), change.norm()
        ratio = sizes[0] / (sizes[1] + 1e-6) if sizes[0] > 0 and sizes[1] > 0 else 1.0
        return weight - LR * ratio * change

    return update


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lamb_equals_its_formula_without_clipping_of_its_own(decay: float) -> None:
    """You et al. 2019, arXiv:1904.00962, algorithm 2, without bias correction (version 3)."""
    options = OptimOptions(optimizer="lamb", weight_decay=decay)
    torch.testing.assert_close(_built(options), _by_formula(_lamb(decay)), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_the_first_step_is_in_proportion_to_the_weights(name: OptimizerName) -> None:
    """lr x |w| for LAMB, lr x 0.001 x |w| (its trust coefficient) for LARS."""
    before = list(_net().parameters())[4].detach()
    change = _built(OptimOptions(optimizer=name), range(1))[4] - before
    expected = LR * (1.0 if name == "lamb" else 1e-3) * float(before.norm())
    assert float(change.norm()) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_same_bits_again(name: OptimizerName) -> None:
    options = OptimOptions(optimizer=name)
    assert all(map(torch.equal, _built(options), _built(options)))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_going_on_from_its_state_gives_the_same_bits(name: OptimizerName) -> None:
    options = OptimOptions(optimizer=name)
    net = _net()
    first = build_optimizer(options, net.named_parameters(), LR)
    _train(net, first, range(3))
    second = build_optimizer(options, net.named_parameters(), LR)
    second.load_state_dict(first.state_dict())
    assert all(map(torch.equal, _train(net, second, range(3, STEPS)), _built(options)))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_batched_operations_everywhere_and_names_kept(name: OptimizerName) -> None:
    net = _net()
    optimizer = build_optimizer(OptimOptions(optimizer=name), net.named_parameters(), LR)
    (group,) = optimizer.param_groups
    assert group["foreach"] is True
    assert group["lr"] == LR
    assert group["param_names"] == [parameter_name for parameter_name, _ in net.named_parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weight_decay_reaches_every_parameter(name: OptimizerName) -> None:
    """Only LARS leaves tensors of one dimension alone, which is part of it."""
    with_decay = _built(OptimOptions(optimizer=name, weight_decay=0.3))
    without = _built(OptimOptions(optimizer=name, weight_decay=0.0))
    for ours, plain, parameter in zip(with_decay, without, _net().parameters(), strict=True):
        assert torch.equal(ours, plain) == (name == "lars" and parameter.ndim == 1)


def test_frozen_parameters_are_left_out() -> None:
    net = _net()
    net[0].requires_grad_(False)
    (group,) = build_optimizer(OptimOptions(), net.named_parameters(), LR).param_groups
    assert group["param_names"] == ["1.weight", "1.bias", "3.weight", "3.bias"]


def test_nothing_to_train_is_said() -> None:
    with pytest.raises(JobError, match="nothing to train"):
        build_optimizer(OptimOptions(), _net().requires_grad_(False).named_parameters(), LR)


def test_a_library_without_an_option_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch_optimizer takes any keyword and drops it, as its version 3.8 does with foreach."""
    entry = OPTIMIZERS["novograd"]
    fixed = {**entry.fixed, "forech": True}
    monkeypatch.setattr(build, "OPTIMIZERS", {"novograd": replace(entry, fixed=fixed)})
    with pytest.raises(UsageError, match=r"pytorch_optimizer \S+ has no forech; install a newer"):
        build_optimizer(OptimOptions(optimizer="novograd"), _net().named_parameters(), LR)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_on_a_gpu_it_gives_the_same_bits_again_without_a_host_sync(name: OptimizerName) -> None:
    options = OptimOptions(optimizer=name)

    def trained() -> list[Tensor]:
        net = _net().cuda()
        optimizer = build_optimizer(options, net.named_parameters(), LR)
        gradients = [[g.cuda() for g in step] for step in _gradients(net)]
        torch.cuda.set_sync_debug_mode("error")
        try:
            for step in gradients:
                for parameter, gradient in zip(net.parameters(), step, strict=True):
                    parameter.grad = gradient
                optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return [parameter.detach().cpu() for parameter in net.parameters()]

    first = trained()
    assert all(map(torch.equal, first, trained()))
    torch.testing.assert_close(first, _built(options), rtol=1e-4, atol=1e-6)
