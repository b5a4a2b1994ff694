"""The template: valid to AWS's own schemas in every shape, and within the rules."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.provision.aws.template import MAX_BYTES, build_template
from tests.launch.waiting import patient

SHAPES = [(1, ()), (2, (0,)), (3, (1, 2, 3))]
"""Nodes, and network cards that get a fabric adapter."""


@pytest.mark.slow
def test_every_shape_is_valid(tmp_path: Path) -> None:
    """By cfn-lint, which knows CloudFormation's schemas."""
    templates = [build_template(*shape, elastic_addresses=bool(shape[1])) for shape in SHAPES]
    templates.append(build_template(1, image_from_ssm=False))
    templates.append(build_template(2, (0,), own_network=False))
    wrong = templates[0].replace('"Encrypted"', '"Encryptd"')
    for index, text in enumerate([*templates, wrong]):
        (tmp_path / f"{index}.json").write_text(text)
    linter = Path(sys.executable).with_name("cfn-lint")
    files = sorted(tmp_path.glob("*.json"))
    done = subprocess.run(
        [linter, "--format", "json", "--regions", "us-east-1", "--", *files],
        capture_output=True,
        text=True,
        timeout=patient(120),
    )
    found = [(Path(each["Filename"]).name, each["Rule"]["Id"]) for each in json.loads(done.stdout)]
    assert found == [(f"{len(templates)}.json", "E3002")], done.stdout


@pytest.mark.parametrize(("nodes", "cards"), SHAPES)
def test_a_template_has_what_was_asked_for(nodes: int, cards: tuple[int, ...]) -> None:
    text = build_template(nodes, cards, elastic_addresses=True)
    resources = json.loads(text)["Resources"]
    kinds = [resource["Type"] for resource in resources.values()]
    assert kinds.count("AWS::EC2::Instance") == kinds.count("AWS::EC2::EIP") == nodes
    assert ("FabricGroup" in resources) == bool(cards)
    used = [i["NetworkCardIndex"] for i in data_of(resources)["NetworkInterfaces"][1:]]
    assert used == list(cards)


def test_a_template_that_is_too_large_is_refused() -> None:
    assert len(build_template(64)) <= MAX_BYTES
    with pytest.raises(UsageError):
        build_template(100)


def data_of(resources: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = resources["NodeTemplate"]["Properties"]["LaunchTemplateData"]
    return found


def test_nodes_are_closed_to_others_and_leave_nothing() -> None:
    resources = json.loads(build_template(2, (0,)))["Resources"]
    data = data_of(resources)
    assert data["MetadataOptions"]["HttpTokens"] == "required"
    assert data["InstanceInitiatedShutdownBehavior"] == "terminate"
    (disk,) = data["BlockDeviceMappings"]
    assert disk["Ebs"]["Encrypted"]
    assert disk["Ebs"]["DeleteOnTermination"]
    assert all(interface["DeleteOnTermination"] for interface in data["NetworkInterfaces"])
    specified = {each["ResourceType"] for each in data["TagSpecifications"]}
    assert specified == {"instance", "volume", "network-interface"}
    address, fabric = data["NetworkInterfaces"]
    assert address["Groups"] == [{"Fn::GetAtt": ["NodeGroup", "GroupId"]}]
    assert fabric["InterfaceType"] == "efa-only"  # without an address that others could reach
    assert fabric["Groups"] == [{"Fn::GetAtt": ["FabricGroup", "GroupId"]}]


def test_security_groups_admit_ssh_and_themselves_alone() -> None:
    resources = json.loads(build_template(2, (0,)))["Resources"]
    rules = {}
    for name, resource in resources.items():
        given = resource["Properties"]
        if resource["Type"] == "AWS::EC2::SecurityGroup":
            listed = given.get("SecurityGroupIngress", []) + given["SecurityGroupEgress"]
            rules[name] = [(rule["CidrIp"], rule["FromPort"], rule["ToPort"]) for rule in listed]
        elif resource["Type"].startswith("AWS::EC2::SecurityGroup"):
            own = given.get("SourceSecurityGroupId") or given["DestinationSecurityGroupId"]
            assert own == given["GroupId"]
            rules[name] = [(own["Fn::GetAtt"][0], given.get("FromPort"), given["IpProtocol"])]
    ports = {"Ref": "FirstPort"}
    assert rules == {
        "NodeGroup": [({"Ref": "SshFrom"}, 22, 22), ("0.0.0.0/0", 443, 443)],
        "TrainingIn": [("NodeGroup", ports, "tcp")],
        "TrainingOut": [("NodeGroup", ports, "tcp")],
        "FabricGroup": [("127.0.0.1/32", 443, 443)],
        "FabricIn": [("FabricGroup", None, "-1")],
        "FabricOut": [("FabricGroup", None, "-1")],
    }
