"""What predictions are made from: run directories, studies, profiles, links of three kinds."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.doctor.bandwidth import HostLink as Way
from paceline.doctor.checks.speed import AllReduce
from paceline.errors import DataError, UsageError
from paceline.gradient_sync.network_model import Network
from paceline.gradient_sync.options import SyncOptions
from paceline.results.profile import Spread, StepProfile
from paceline.scaling.fitting import SizeTime
from paceline.scaling.prediction import predict
from paceline.scaling.prediction_inputs import (
    examined_link,
    fitted_link,
    read_inputs,
    stated_link,
)
from paceline.scaling.prediction_report import predict_study
from tests.scaling.vgg import STEP_S, cluster_of, profile_of

VGG = profile_of()
TRUE = Network(bandwidth_bytes_per_s=8e8, round_trip_s=1e-4)


def step_at(nodes: int, method: SyncOptions) -> float:
    return predict(VGG, method, cluster_of(VGG, nodes, TRUE)).step_s


def size(nodes: int, method: SyncOptions, **more: object) -> dict[str, object]:
    options = {"powersgd_rank": method.powersgd_rank} if method.sync == "powersgd" else {}
    step_s = step_at(nodes, method)
    return {
        "workers": nodes,
        "nodes": nodes,
        "method": method.sync,
        "method_options": options,
        "global_batch": 32 * nodes,
        "step_s": {"median": step_s, "low": step_s, "high": step_s},
        "repeats": [],
        **more,
    }


PLAIN, LOW_RANK = SyncOptions(sync="allreduce"), SyncOptions(sync="powersgd", powersgd_rank=2)


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Three runs of one worker, of which the second is the middle one and the last failed."""
    repeats = []
    for place, (times, problem) in enumerate([(2.0, None), (1.0, None), (0.5, None), (9.0, "x")]):
        run = tmp_path / f"one-{place}"
        run.mkdir()
        step_s = times * STEP_S
        spread = Spread(median=step_s, low=step_s, high=step_s)
        (run / "profile.json").write_text(replace(VGG, step_s=spread).to_json())
        repeats.append({"run_dir": run.name, "problem": problem})
    sizes = [
        size(1, PLAIN, repeats=repeats),
        *(size(nodes, method) for nodes in (2, 4) for method in (PLAIN, LOW_RANK)),
        size(8, PLAIN, step_s=None),
    ]
    told = {"format": 1, "kind": "scale", "mode": "weak", "sizes": sizes}
    (tmp_path / "study.json").write_text(json.dumps(told))
    return tmp_path


def test_a_profile_and_a_run_directory(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text(VGG.to_json())
    assert read_inputs(tmp_path).profile == VGG
    assert read_inputs(tmp_path / "profile.json").profile == VGG


def test_a_study(study: Path) -> None:
    inputs = read_inputs(study)
    assert inputs.profile == VGG
    assert inputs.sizes == tuple(SizeTime(nodes=n, step_s=step_at(n, PLAIN)) for n in (2, 4))
    assert inputs.methods == (PLAIN, LOW_RANK)
    assert inputs.mode == "weak"


def test_a_study_tells_its_own_link(study: Path) -> None:
    link = fitted_link(read_inputs(study), None, "nccl")
    assert link.network.bandwidth_bytes_per_s == pytest.approx(8e8, rel=1e-3)
    assert link.source == (
        "6.4 Gbit/s, which explains the study's own sizes to 0 % of their steps; round-trip 100 µs"
    )


def test_what_a_study_says_of_more_nodes(study: Path) -> None:
    told = predict_study(study)
    assert told is not None
    plain, low_rank = json.loads(json.dumps(told))["methods"]
    assert (plain["method"], low_rank["label"]) == ("allreduce", "powersgd rank 2")
    assert [s["nodes"] for s in plain["sizes"]] == [2, 4, 8, 16]
    for one in plain["sizes"][:2]:
        assert one["step_s"] == pytest.approx(step_at(one["nodes"], PLAIN), rel=1e-3)
        assert one["low"] < one["efficiency"] < one["high"]


def changed(study: Path, **more: object) -> None:
    """Change each size of several workers with all-reduce."""
    told = json.loads((study / "study.json").read_text())
    for each in told["sizes"]:
        if each["workers"] > 1 and each["method"] == "allreduce":
            each |= more
    (study / "study.json").write_text(json.dumps(told))


@pytest.mark.parametrize("step_s", [STEP_S / 2, STEP_S, 1e6 * STEP_S])
def test_steps_that_no_network_explains_foretell_nothing(study: Path, step_s: float) -> None:
    """They are faster than one worker's, as fast, or wait for something else."""
    changed(study, step_s={"median": step_s, "low": step_s, "high": step_s})
    with pytest.raises(UsageError, match=r"say nothing about the network.*--link 25gbit"):
        predict_study(study)


def test_a_size_of_unlike_nodes_counts_nothing(study: Path) -> None:
    told = json.loads((study / "study.json").read_text())
    told["sizes"].insert(3, size(4, PLAIN, workers=5))
    told["sizes"].insert(3, size(2, PLAIN, workers=4, global_batch=128))
    told["asked"] = {"hosts": ["a", "b"]}
    (study / "study.json").write_text(json.dumps(told))
    inputs = read_inputs(study)
    assert [(each.nodes, each.per_node) for each in inputs.sizes] == [(2, 1), (2, 2), (4, 1)]
    foretold = predict_study(study)
    assert foretold is not None
    assert foretold["gpus_per_node"] == 1
    told["asked"] = {"hosts": ["a:3", "b:1"]}  # four workers there are three and one
    told["sizes"] = [each for each in told["sizes"] if each["nodes"] < 4]
    (study / "study.json").write_text(json.dumps(told))
    assert read_inputs(study).sizes == ()


def test_one_worker_is_taken_alone(study: Path) -> None:
    told = json.loads((study / "study.json").read_text())
    told["sizes"].append({**told["sizes"][0], "method": "ordered", "repeats": [{"run_dir": "no"}]})
    (study / "study.json").write_text(json.dumps(told))
    inputs = read_inputs(study)
    assert inputs.profile == VGG
    assert inputs.methods == (PLAIN, LOW_RANK)


def test_sentences_keep_to_what_was_measured(study: Path) -> None:
    changed(study, efficiency={"median": 0.123, "low": 0.1, "high": 0.2})
    foretold = predict_study(study)
    assert foretold is not None
    sentences = foretold["text"]
    assert isinstance(sentences, list)
    assert sentences[0].startswith("All-reduce pays on none of these sizes: 2 nodes reach 0.12")


def test_a_study_of_another_format(study: Path) -> None:
    told = json.loads((study / "study.json").read_text())
    (study / "study.json").write_text(json.dumps({**told, "format": 2}))
    with pytest.raises(DataError, match="it has format 2, and this Paceline reads 1"):
        read_inputs(study)


def test_a_study_of_one_host_foretells_nothing(study: Path) -> None:
    told = json.loads((study / "study.json").read_text())
    for each in told["sizes"]:
        each["nodes"] = 1
    (study / "study.json").write_text(json.dumps(told))
    assert predict_study(study) is None
    with pytest.raises(UsageError, match=r"measured on one host.*--link 25gbit --rtt 50us"):
        fitted_link(read_inputs(study), None, "gloo")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"sizes": [{}]}', '{"sizes": 3, "mode": 1}'])
def test_a_damaged_study(tmp_path: Path, text: str) -> None:
    (tmp_path / "study.json").write_text(text)
    with pytest.raises(DataError, match=r"study\.json isn't a study of Paceline"):
        read_inputs(tmp_path)


def test_a_study_without_one_worker(study: Path) -> None:
    told = json.loads((study / "study.json").read_text())
    del told["sizes"][0]
    (study / "study.json").write_text(json.dumps(told))
    with pytest.raises(DataError, match="holds no measurement of one worker"):
        read_inputs(study)


def test_nothing_is_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no profile\.json and no study\.json"):
        read_inputs(tmp_path)
    with pytest.raises(UsageError, match=r"holds no profile\.json and no study\.json"):
        read_inputs(tmp_path / "nowhere")


def test_a_stated_link_carries_headers_too() -> None:
    link = stated_link("1gbit", None, "gloo")
    assert link.network == Network(bandwidth_bytes_per_s=0.957 * 125e6, round_trip_s=1e-4)
    assert link.source == "1 Gbit/s, as stated, of which 95.7 % is payload; round-trip 100 µs"


def test_gloo_doesnt_use_a_fast_link() -> None:
    assert stated_link("100gbit", "50us", "gloo").network.bandwidth_bytes_per_s == 1.25e9
    assert stated_link("100gbit", "50us", "nccl").network.bandwidth_bytes_per_s > 1.1e10
    assert "Gloo is taken to use 10 Gbit/s" in stated_link("100gbit", "50us", "gloo").source


def diagnosis(path: Path, reduced: AllReduce | None, *ways: Way) -> Path:
    told = {
        "links": [way.to_json() for way in ways],
        "all_reduce": None if reduced is None else reduced.to_json(),
    }
    path.write_text(json.dumps(told))
    return path


WAYS = (
    Way(source="a", target="b", bandwidth_bytes_per_s=6e8, several_bytes_per_s=3e9),
    Way(
        source="b",
        target="a",
        bandwidth_bytes_per_s=5e8,
        several_bytes_per_s=2e9,
        round_trip_s=6e-5,
    ),
)


def test_what_the_doctor_measured(tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    right = AllReduce(hosts=2, backend="gloo", size_bytes=10**8, seconds=0.25, is_right=True)
    link = examined_link(diagnosis(path, right, *WAYS), None, "gloo")
    assert link.network == Network(bandwidth_bytes_per_s=4e8, round_trip_s=6e-5)
    assert "its all-reduce as doctor measured it" in link.source
    wrong = replace(right, is_right=False)
    for reduced in (wrong, None):
        slowest = examined_link(diagnosis(path, reduced, *WAYS), "1ms", "gloo").network
        assert slowest == Network(bandwidth_bytes_per_s=5e8, round_trip_s=1e-3)
    several = examined_link(diagnosis(path, None, *WAYS), None, "nccl").network
    assert several.bandwidth_bytes_per_s == 2e9
    by_gloo = examined_link(diagnosis(path, right, *WAYS), None, "nccl").network
    assert by_gloo.bandwidth_bytes_per_s == 2e9


def test_a_doctor_without_links(tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    with pytest.raises(UsageError, match="holds no measured link"):
        examined_link(diagnosis(path, None), None, "gloo")
    way = '{"round_trip_s": null, "bandwidth_bytes_per_s": "fast", "several_bytes_per_s": null}'
    unreadable = f'{{"links": [{way}], "all_reduce": 0}}'
    for text in ("[]", '{"links": [], "all_reduce": [1]}', unreadable):
        path.write_text(text)
        with pytest.raises(UsageError, match=r"isn't what `paceline doctor --hosts \.\.\. --json`"):
            examined_link(path, None, "gloo")
    with pytest.raises(UsageError, match="isn't what"):
        examined_link(tmp_path / "nowhere", None, "gloo")


def test_the_profile_of_the_page_is_the_one_that_is_computed_here() -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "vgg19-t4.json"
    assert StepProfile.read(page) == VGG
