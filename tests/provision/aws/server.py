"""moto's server, with what it lacks for a cluster's stack, and faults by request. A process's main.

Prints its port. Added: networks in stacks that can be deleted. `POST /faults` with
JSON says what goes wrong from then on: `hold` keeps stacks in the making, `fail` gives the reason
why they fail, `deny` lists operations that aren't permitted, `console` is what consoles show. With
`s3`, requests about objects whose names end with `on` `fail` or `hang`, or the bytes that they send
are changed (`corrupt`).
"""

import base64
import io
import json
import re
import threading
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import parse_qs

from moto.core.responses import ActionResult
from moto.ec2 import models as ec2
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import (
    elastic_ip_addresses,
    elastic_network_interfaces,
    internet_gateways,
    route_tables,
    subnets,
)
from moto.ec2.responses.tags import TagResponse
from moto.ec2.utils import random_ip
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

Environ = dict[str, Any]
Start = Callable[..., object]


def exists(backend: Any, resource: str) -> bool:
    """Whether a resource is there: moto keeps the tags of those that were deleted."""
    if resource.startswith("eni-"):
        return resource in backend.enis
    if "-" not in resource:
        return any(each.public_ip == resource for each in backend.addresses)
    try:
        return bool(backend.do_resources_exist([resource]))
    except EC2ClientError:
        return False


def mend() -> None:
    """Let stacks with networks be deleted, tags go with them, and addresses be safe ones."""

    def describe_tags(self: Any) -> ActionResult:
        tags = self.ec2_backend.describe_tags(self._filters_from_querystring())
        found = [tag for tag in tags if exists(self.ec2_backend, tag["resource_id"])]
        return ActionResult({"Tags": found})

    def delete_table(self: Any, account: str, region: str) -> None:
        self._associations.clear()
        ec2.ec2_backends[account][region].delete_route_table(self.id)

    def delete_nothing(self: Any, account: str, region: str) -> None:
        """Deleted with the table."""

    def delete_address(self: Any, account: str, region: str) -> None:
        ec2.ec2_backends[account][region].release_address(allocation_id=self.allocation_id)

    def delete_gateway(self: Any, account: str, region: str) -> None:
        backend = ec2.ec2_backends[account][region]
        if self.vpc is not None:
            backend.detach_internet_gateway(self.id, self.vpc.id)
        backend.delete_internet_gateway(self.id)

    TagResponse.describe_tags = describe_tags  # type: ignore[method-assign]
    elastic_ip_addresses.ElasticAddress.delete = delete_address  # type: ignore[attr-defined]
    internet_gateways.InternetGateway.delete = delete_gateway  # type: ignore[attr-defined]
    route_tables.RouteTable.delete = delete_table  # type: ignore[attr-defined]
    route_tables.Route.delete = delete_nothing  # type: ignore[attr-defined]
    subnets.SubnetRouteTableAssociation.delete = delete_nothing  # type: ignore[attr-defined]
    # The addresses that moto invents belong to somebody: tests must not knock there.
    setattr(elastic_network_interfaces, "random_public_ip", random_ip)  # noqa: B010  # as mypy asks


class Front:
    """Answers what moto can't, and makes the faults that were asked for."""

    def __init__(self, moto: Callable[[Environ, Start], Iterable[bytes]]) -> None:
        self._moto = moto
        self._faults: dict[str, Any] = {}

    def __call__(self, environ: Environ, start: Start) -> Iterable[bytes]:
        size = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(size)
        if environ["PATH_INFO"] == "/faults":
            self._faults = json.loads(body)
            return _answer(start, b"{}")
        environ["wsgi.input"] = io.BytesIO(body)
        if environ["PATH_INFO"].endswith(self._faults.get("on", "\0")):
            return self._spoilt(environ, body, start)
        service, operation = _asked(environ, body)
        own = self._own(service, operation)
        if own is not None:
            status, content = own
            kind = "text/xml" if content.startswith(b"<") else "application/x-amz-json-1.1"
            return _answer(start, content, status, kind)
        return self._changed(operation, environ, start)

    def _spoilt(self, environ: Environ, body: bytes, start: Start) -> Iterable[bytes]:
        """Answer a request about an object of S3 as a bad store does."""
        if self._faults["s3"] == "hang":
            threading.Event().wait()
        if self._faults["s3"] == "fail":
            error = b"<Error><Code>ServiceUnavailable</Code><Message>no</Message></Error>"
            return _answer(start, error, "501 Not Implemented", "text/xml")
        if environ["REQUEST_METHOD"] == "PUT":  # and "corrupt"
            environ["wsgi.input"] = io.BytesIO(body[:-1] + bytes([body[-1] ^ 1]))
        return self._moto(environ, start)

    def _own(self, service: str, operation: str) -> tuple[str, bytes] | None:
        if f"{service}:{operation}" in self._faults.get("deny", ()):
            return _denied(service, operation)
        faults = self._faults
        if operation == "GetConsoleOutput" and "console" in faults:
            return _ok(_console(faults["console"]))
        if operation == "DescribeStackEvents" and "fail" in faults:
            return _ok(EVENTS.replace("REASON", faults["fail"]))
        return None

    def _changed(self, operation: str, environ: Environ, start: Start) -> Iterable[bytes]:
        hold, fail = self._faults.get("hold"), self._faults.get("fail")
        if operation != "DescribeStacks" or not (hold or fail):
            return self._moto(environ, start)
        status = "CREATE_IN_PROGRESS" if hold else "ROLLBACK_COMPLETE"
        kept: list[Any] = []
        content = b"".join(self._moto(environ, lambda *given: kept.extend(given)))
        content = content.replace(b"CREATE_COMPLETE", status.encode())
        headers = [(name, value) for name, value in kept[1] if name.lower() != "content-length"]
        start(kept[0], [*headers, ("Content-Length", str(len(content)))])
        return [content]


def _asked(environ: Environ, body: bytes) -> tuple[str, str]:
    """Find out service and operation of a request."""
    scope = re.search(r"/([\w-]+)/aws4_request", environ.get("HTTP_AUTHORIZATION", ""))
    target = environ.get("HTTP_X_AMZ_TARGET", "").rpartition(".")[2]
    operation = target or parse_qs(body.decode("utf-8", "replace")).get("Action", [""])[0]
    return (scope[1] if scope else "", operation)


def _answer(
    start: Start, content: bytes, status: str = "200 OK", kind: str = "application/json"
) -> list[bytes]:
    start(status, [("Content-Type", kind), ("Content-Length", str(len(content)))])
    return [content]


def _denied(service: str, operation: str) -> tuple[str, bytes]:
    message = (
        f"User: arn:aws:iam::123456789012:user/me is not authorized to perform: "
        f"{service}:{operation} on resource: x"
    )
    code = "UnauthorizedOperation" if service == "ec2" else "AccessDenied"
    error = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    wrapped = f"<Response><Errors>{error}</Errors></Response>"
    if service == "cloudformation":
        wrapped = f"<ErrorResponse>{error}</ErrorResponse>"
    return "403 Forbidden", wrapped.encode()


def _ok(content: str) -> tuple[str, bytes]:
    return "200 OK", content.encode()


def _console(text: str) -> str:
    output = base64.b64encode(text.encode()).decode()
    return f"<GetConsoleOutputResponse><output>{output}</output></GetConsoleOutputResponse>"


EVENTS = """<DescribeStackEventsResponse><DescribeStackEventsResult><StackEvents>
<member><LogicalResourceId>Node1</LogicalResourceId><ResourceStatus>CREATE_FAILED</ResourceStatus>
<ResourceStatusReason>Resource creation cancelled</ResourceStatusReason></member>
<member><LogicalResourceId>Node0</LogicalResourceId><ResourceStatus>CREATE_FAILED</ResourceStatus>
<ResourceStatusReason>REASON</ResourceStatusReason></member>
<member><LogicalResourceId>Network</LogicalResourceId><ResourceStatus>CREATE_COMPLETE
</ResourceStatus></member></StackEvents></DescribeStackEventsResult></DescribeStackEventsResponse>"""


def main() -> None:
    """Serve until the process is ended."""
    mend()
    app = Front(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True)
    print(server.port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
