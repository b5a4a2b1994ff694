"""The template: valid to AWS's own schemas in every shape, and within the rules."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.provision.aws.template import MOST_BYTES, Shape, build_template, read_script
from tests.launch.waiting import patient
from tests.provision.aws.rules import broken_rules

ROOT = Path(__file__).resolve().parents[3]
SHAPES = [
    Shape(nodes=nodes, fabric_cards=cards, elastic_addresses=elastic, own_network=own)
    for nodes, cards, elastic in (
        (1, (), False),
        (2, (), False),
        (2, (0,), False),
        (2, (0,), True),
        (3, (1, 2, 3), True),
        (64, (), False),
    )
    for own in (True, False)
]


def name_of(shape: Shape) -> str:
    words = [f"{shape.nodes} nodes", f"{len(shape.fabric_cards)} cards"]
    words += ["elastic"] if shape.elastic_addresses else []
    return " ".join([*words, "own" if shape.own_network else "subnet"])


def lint(directory: Path, templates: list[str]) -> list[dict[str, Any]]:
    """Run cfn-lint, which knows CloudFormation's schemas, in a process of its own."""
    for index, text in enumerate(templates):
        (directory / f"{index}.json").write_text(text)
    linter = Path(sys.executable).with_name("cfn-lint")
    files = sorted(map(str, directory.glob("*.json")))
    done = subprocess.run(
        [linter, "--format", "json", "--regions", "us-east-1", "--", *files],
        capture_output=True,
        text=True,
        timeout=patient(120),
    )
    assert done.returncode in (0, 2, 4, 6), done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_every_shape_is_valid(tmp_path: Path) -> None:
    found = lint(tmp_path, [build_template(shape) for shape in SHAPES if shape.nodes < 64])
    assert [(each["Filename"], each["Message"]) for each in found] == []


@pytest.mark.slow
def test_what_is_not_valid_is_found(tmp_path: Path) -> None:
    text = build_template(Shape(nodes=1))
    wrong = text.replace('"Strategy":"cluster"', '"Strategy":"scattered"')
    wrong = wrong.replace('"Encrypted"', '"Encryptd"')
    rules = {each["Rule"]["Id"] for each in lint(tmp_path, [wrong])}
    assert {"E3030", "E3002"} <= rules


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_every_shape_keeps_the_rules(shape: Shape) -> None:
    assert broken_rules(build_template(shape)) == []


@pytest.mark.parametrize(
    ("right", "wrong", "what"),
    [
        ('"CidrIp":{"Ref":"SshFrom"}', '"CidrIp":"0.0.0.0/0"', "from the world"),
        ('"FromPort":443', '"FromPort":0', "to the world"),
        ('"IpProtocol":"tcp","FromPort":{', '"IpProtocol":"-1","FromPort":{', "protocol -1"),
        ('["NodeGroup","GroupId"]}]', '["FabricGroup","GroupId"]}]', "fabric's group"),
        ('"Action":"s3:ListBucket"', '"Action":"s3:*"', "s3:*"),
        ('{"Fn::Sub":"arn:${AWS::Partition}:s3:::${Bucket}"}', '"*"', "Resource: *"),
        ('"HttpTokens":"required"', '"HttpTokens":"optional"', "IMDSv1"),
        ('"Encrypted":true', '"Encrypted":false', "encrypted"),
        ('"DeleteOnTermination":true}]', '"DeleteOnTermination":false}]', "outlives"),
        ('"terminate","InstanceMarket', '"stop","InstanceMarket', "goes on costing"),
        ('"ResourceType":"volume"', '"ResourceType":"elastic-gpu"', "volume"),
        ('"Domain":"vpc","Tags"', '"Domain":"vpc","T"', "no tag"),
    ],
)
def test_what_breaks_the_rules_is_found(right: str, wrong: str, what: str) -> None:
    shape = Shape(nodes=2, fabric_cards=(0,), elastic_addresses=True)
    text = build_template(shape)
    assert right in text
    assert any(what in broken for broken in broken_rules(text.replace(right, wrong)))


@settings(max_examples=60)
@given(
    nodes=st.integers(1, 64),
    cards=st.integers(0, 32),
    elastic=st.booleans(),
    own=st.booleans(),
)
def test_a_template_has_what_was_asked_for(
    nodes: int, cards: int, elastic: bool, own: bool
) -> None:
    shape = Shape(
        nodes=nodes,
        fabric_cards=tuple(range(cards)),
        elastic_addresses=elastic,
        own_network=own,
    )
    try:
        text = build_template(shape)
    except UsageError:
        assert nodes > 40
        return
    assert len(text) <= MOST_BYTES
    resources = json.loads(text)["Resources"]
    kinds = [resource["Type"] for resource in resources.values()]
    assert kinds.count("AWS::EC2::Instance") == nodes
    assert kinds.count("AWS::EC2::EIP") == (nodes if elastic else 0)
    assert kinds.count("AWS::EC2::VPC") == (1 if own else 0)
    assert ("FabricGroup" in resources) == (cards > 0)
    data = resources["NodeTemplate"]["Properties"]["LaunchTemplateData"]
    used = [i["NetworkCardIndex"] for i in data["NetworkInterfaces"] if i["DeviceIndex"] == 1]
    assert used == list(range(cards))
    for name, resource in resources.items():
        assert set(resource.get("DependsOn", [])) <= resources.keys(), name


def test_too_many_nodes_are_refused() -> None:
    with pytest.raises(UsageError, match="fewer nodes"):
        build_template(Shape(nodes=100))


def test_the_package_carries_template_and_script(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=patient(120),
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("paceline/provision/aws/node.sh").decode() == read_script()
        assert b"Node0" in archive.read("paceline/provision/aws/stack.json")
