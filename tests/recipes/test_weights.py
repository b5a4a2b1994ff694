import re
from pathlib import Path

import pytest
import torch
import torchvision  # noqa: F401  # its first import sets variables of the environment
from safetensors.torch import save_file
from torch import Tensor, nn

from paceline.errors import DataError
from paceline.recipes.weights import download_weights, read_weights, take_over


def model(classes: int = 3) -> nn.Module:
    parts = {"encoder": nn.Linear(4, 5), "head": nn.Sequential(nn.Linear(5, classes))}
    return nn.ModuleDict(parts)


def weights(classes: int = 3) -> dict[str, Tensor]:
    torch.manual_seed(5)
    return dict(model(classes).state_dict())


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt", "w.pth"])
def test_both_formats(name: str, tmp_path: Path) -> None:
    path, written = tmp_path / name, weights()
    save_file(written, path) if path.suffix == ".safetensors" else torch.save(written, path)
    found = read_weights(path)
    assert found.keys() == written.keys()
    assert all(torch.equal(found[n], written[n]) for n in written)


def test_names_as_distributed_training_writes_them(tmp_path: Path) -> None:
    torch.save({f"module.{n}": t for n, t in weights().items()}, tmp_path / "w.pt")
    assert read_weights(tmp_path / "w.pt").keys() == weights().keys()


class Malicious:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("touched"),)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"state_dict": weights(), "epoch": 3}, "a mapping with 'state_dict', 'epoch'"),
        ([1, 2], "a list"),
        ({}, "a mapping with"),
        (Malicious(), "can't be read as weights"),
    ],
)
def test_other_content_is_refused(
    content: object, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(content, "w.pt")
    with pytest.raises(DataError, match=told):
        read_weights(Path("w.pt"))
    assert not Path("touched").exists()


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_damaged_and_missing_files(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no weights file"):
        read_weights(tmp_path / name)
    (tmp_path / name).write_bytes(b"no weights at all")
    with pytest.raises(DataError, match=f"{name} can't be read as weights"):
        read_weights(tmp_path / name)


def test_all_that_fits_is_taken_over() -> None:
    made, given = model(), weights()
    assert take_over(made, given, source="w", own="head.") == ()
    assert all(torch.equal(t, given[n]) for n, t in made.state_dict().items())


def test_another_number_of_classes_keeps_the_last_layer() -> None:
    made, given = model(), weights(classes=9)
    before = made.state_dict()["head.0.weight"].clone()
    assert take_over(made, given, source="w", own="head.") == ("head.0",)
    assert torch.equal(made.state_dict()["encoder.weight"], given["encoder.weight"])
    assert torch.equal(made.state_dict()["head.0.weight"], before)


def test_weights_of_another_model_are_refused() -> None:
    given = weights()
    for name in ("encoder.weight", "more"):
        wrong = {**given, name: torch.zeros(2)}
        with pytest.raises(DataError, match="w holds weights of another model"):
            take_over(model(), wrong, source="w", own="head.")


def test_without_internet_it_says_where_to_put_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(url: str, path: str, digits: str, progress: bool) -> None:
        assert digits == "dcbb9e9d"
        raise OSError("no route to host")

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", fail)
    told: list[str] = []
    with pytest.raises(DataError, match="no route to host") as error:
        download_weights("vgg19", told.append)
    url = "https://download.pytorch.org/models/vgg19-dcbb9e9d.pth"
    assert f"download {url} and put it into {tmp_path / 'checkpoints'}" in str(error.value)
    assert re.match(f"downloading {url} to ", told[0])
    torch.save(weights(), tmp_path / "checkpoints" / "vgg19-dcbb9e9d.pth")
    assert download_weights("vgg19").keys() == weights().keys()
